"""Whether a model is supported, and what engines draft with, from its config.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mtpctl.errors import UserError
from mtpctl.families.drafters import default_kind
from mtpctl.families.reading import missing_fields, shape_of, unsupported_by_vllm_cpu
from mtpctl.families.shape import ModelShape

SGLANG_TESTED = ("mimo",)
"""Families whose drafts in SGLang are covered by mtpctl's tests."""


class Drafting(NamedTuple):
    """A model's drafter, and what each engine drafts with; empty for an engine that cannot draft."""

    drafter: str
    vllm: str
    sglang: str


@dataclass(frozen=True, slots=True)
class Support:
    """A supported model. cpu_limits: restrictions of vLLM on a CPU for this model, in fp32 or bf16."""

    shape: ModelShape
    drafting: Drafting
    cpu_limits: tuple[str, ...]


def support_of(config: Mapping[str, object]) -> Support:
    """Report the support for the model of a config. Raises UserError if it is not supported; the message names the missing part."""
    shape = shape_of(config)
    if errors := list(missing_fields(config)):
        raise UserError(errors[0])
    fp32, bf16 = (list(unsupported_by_vllm_cpu(shape, dtype)) for dtype in ("fp32", "bf16"))
    return Support(shape, drafting_of(config, shape), tuple(dict.fromkeys([*fp32, *bf16])))


def drafting_of(config: Mapping[str, object], shape: ModelShape) -> Drafting:
    """The drafter of a model with this config and shape."""
    if shape.eagle3 is not None:
        return Drafting("an EAGLE-3 drafter", "its EAGLE-3 drafter", "")
    if shape.dflash is not None:
        count = f"{shape.dflash.layers} layer{'s' * (shape.dflash.layers > 1)}"
        return Drafting(f"a DFlash drafter with {count}", "its DFlash drafter", "")
    if not shape.mtp_layers:
        if default_kind(config) == "eagle3":
            return Drafting("none; mtpctl add-drafter creates an EAGLE-3 drafter", "the EAGLE-3 drafter of mtpctl add-drafter", "")
        created = "the MTP layer of mtpctl add-drafter"
        return Drafting("none; mtpctl add-drafter creates an MTP layer", created, created)
    tested = "" if shape.family in SGLANG_TESTED else "; mtpctl's tests do not cover this family"
    sglang = f"EAGLE over the MTP layers, on GPUs{tested}"
    if shape.mtp_layers == 1:
        return Drafting("1 MTP layer", "the MTP layer, repeated for each further draft token", sglang)
    several = "each MTP layer at its depth on GPUs; the first layer, for one draft token, on a CPU"
    return Drafting(f"{shape.mtp_layers} MTP layers", several, sglang)
