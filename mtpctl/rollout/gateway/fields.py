"""The fields of a chat request: which are honored, which need nothing done, and which are rejected.

Nothing that changes an answer is left out silently. A field of OpenAI's or vLLM's schema, or of none, that is not honored is an error that
names it, unless its value asks for what happens anyway. With `rollout.gateway_fields: ignore` it is listed in a header of the answer.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mtpctl.web.json_body import shown

WITHOUT_EFFECT = frozenset(
    {
        "user",
        "safety_identifier",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "request_id",
        "session_id",
    }
)
"""Fields for the bookkeeping of a provider. They ask for nothing that an answer would show."""
ANYWAY: Mapping[str, tuple[object, ...]] = {
    # OpenAI's
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM's
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "cache_salt": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "ec_transfer_params": (),
    "ignore_eos": (False,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logprob_token_ids": (),
    "media_io_kwargs": (),
    "mm_payload": ("tensors",),
    "mm_processor_kwargs": (),
    "priority": (0,),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "return_mm_kwargs": (False,),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}
"""Fields that are not honored, with the values that ask for what happens anyway; null does so always."""


@dataclass(frozen=True)
class FieldRules:
    """`serving`: nothing is trained on, so clients decide how tokens are drawn. `ignore`: what is not honored is listed, not rejected."""

    serving: bool = False
    ignore: bool = False


def not_honored(others: Mapping[str, object], honored: Collection[str]) -> dict[str, str]:
    """Of the fields of a request that are not `honored`, those that ask for something, each with the reason why it is rejected."""
    reasons: dict[str, str] = {}
    for name, value in others.items():
        if name in WITHOUT_EFFECT or (name in ANYWAY and (value is None or value in ANYWAY[name])):
            continue
        if name in ANYWAY:
            reasons[name] = "is not supported; leave it out"
            continue
        near = difflib.get_close_matches(name[:40], [*honored, *ANYWAY], 1)
        reasons[shown(name)[1:-1]] = f"is no field of a chat request{f'; did you mean {near[0]}?' if near else ''}"
    return reasons
