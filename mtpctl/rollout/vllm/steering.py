"""Converts the settings of served requests for vLLM, and vLLM's reasons for rejecting a request."""

from __future__ import annotations

from typing import Any

from mtpctl.errors import UserError
from mtpctl.samples import Steering

WITHOUT_DRAFTS = ("min_p", "logit_bias")
"""Rejected by vLLM 0.32 while it speculates, because its rejection sampler does not apply them (`SamplingParams._validate_spec_decode`)."""


def sampling_of(steering: Steering, *, drafts: bool) -> dict[str, Any]:
    """Keyword arguments of vLLM's `SamplingParams`. `drafts`: whether the engine speculates.

    Raises UserError for settings that vLLM rejects while it speculates, and for a grammar that vLLM cannot parse.
    """
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import StructuredOutputsParams

    changed = steering.changed
    if drafts and (names := [name for name in WITHOUT_DRAFTS if name in changed]):
        raise UserError(f"{names[0]}: vLLM cannot apply it while it speculates; leave it out, or set rollout.speculation.num_tokens: 0")
    settings = {name: getattr(steering, name) for name in changed if name != "grammar"}
    if steering.grammar:
        try:
            settings["structured_outputs"] = StructuredOutputsParams(**steering.grammar)  # type: ignore[arg-type]
        except VLLMClientError as error:
            raise UserError(f"response_format: {rejection(error)}") from error
    return settings


def rejection(error: Exception) -> str:
    """vLLM's reason for rejecting a request, as one line that begins with the field."""
    text = " ".join(str(error.args[0] if error.args else error).split())[:400]
    field = getattr(error, "parameter", None)
    return f"{field}: {text}" if field else text
