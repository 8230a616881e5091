"""Rotary embeddings as a Hugging Face config describes them, read as transformers and the engines read them.

A config may have `rope_scaling` (the older name) and `rope_parameters`. If both are there, `rope_scaling` replaces `rope_parameters` as a
whole. Fields that the remaining object lacks are read from the config itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from mtpctl.errors import UserError
from mtpctl.families.fields import Fields, mapping
from mtpctl.families.registry import Family
from mtpctl.families.shape import RopeScaling

REQUIRED = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ("factor",)}
"""Required numbers, by kind of scaling."""

OPTIONAL = {
    "linear": (),
    "llama3": ("original_max_position_embeddings",),
    "yarn": ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
}
"""Optional numbers, by kind of scaling."""

MAGNITUDES = ("mscale", "mscale_all_dim")
"""Further numbers of YaRN; 0 means unset."""

LAYER_KINDS = ("full_attention", "linear_attention", "sliding_attention", "chunked_attention")
"""Keys of a config that has rotary embeddings for each kind of layer."""


@dataclass(frozen=True, slots=True)
class RopeFields:
    """theta: base of the wavelengths; fraction: rotated share of a head; positions: tokens that the embedding covers."""

    theta: float
    scaling: RopeScaling | None
    fraction: float
    positions: int


def rope_fields(family: Family, config: Mapping[str, object], positions: int) -> RopeFields:
    """Read the rotary embedding of a config whose `max_position_embeddings` is `positions`.

    Raises UserError for a scaling that the trainer does not compute, and if a number is missing or of another type.
    """
    rope, above = Fields(mapping(config, "rope_scaling") or mapping(config, "rope_parameters")), Fields(config)
    if any(isinstance(rope.raw.get(kind), Mapping) for kind in LAYER_KINDS):
        raise UserError(f"model config: rope_parameters for each kind of layer are not supported for {family.name}; use one for all layers")
    fraction = rope.number("partial_rotary_factor", above.number("partial_rotary_factor", family.rotary_fraction))
    if fraction != family.rotary_fraction and (family.rotary_fraction == 1.0 or family.latent):
        # In these families transformers ignores the field and engines apply it.
        raise UserError(f"model config: partial_rotary_factor {fraction:g} is not supported for {family.name}; 1 is")
    scaling = _scaling(family, rope, positions)
    if scaling is not None:
        positions = _covered(scaling, positions)
    return RopeFields(rope.number("rope_theta", above.number("rope_theta", family.rope_theta)), scaling, fraction, positions)


def _scaling(family: Family, rope: Fields, positions: int) -> RopeScaling | None:
    """The scaling fields, checked for the numbers that their kind needs; None if RoPE is not scaled."""
    kind, older = (rope.raw.get(name) for name in ("rope_type", "type"))
    if kind is not None and older is not None and kind != older:
        raise UserError(f"model config: rope_type {kind!r} and type {older!r} contradict each other; keep rope_type")
    kind = kind or older or "default"
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in REQUIRED:
        raise UserError(f"model config: RoPE scaling {kind!r} is not supported; linear, llama3 and yarn are")
    for key in REQUIRED[kind]:
        if rope.raw.get(key) is None:
            raise UserError(f"model config: RoPE scaling {kind!r} lacks {key}")
    for key in (*REQUIRED[kind], *OPTIONAL[kind]):
        rope.number(key, 1.0)
    if kind == "llama3" and rope.number("low_freq_factor", 1.0) >= rope.number("high_freq_factor", 4.0):
        raise UserError("model config: low_freq_factor of RoPE scaling 'llama3' must be below high_freq_factor")
    if kind == "yarn":
        for key in MAGNITUDES:
            if rope.raw.get(key):
                rope.number(key, 1.0)
        rope.switch("truncate", True)
    if family.latent:
        _check_latent(family, kind, rope)
    # Everything but linear scaling refers to the length that the model was trained with.
    trained = {} if kind == "linear" else {"original_max_position_embeddings": rope.whole("original_max_position_embeddings", positions)}
    return cast(RopeScaling, {**rope.raw, "rope_type": kind, **trained})


def _check_latent(family: Family, kind: str, rope: Fields) -> None:
    """Reject scalings that engines compute differently from transformers for latent attention: engines support YaRN with mscale only."""
    if kind != "yarn":
        raise UserError(f"model config: RoPE scaling {kind!r} is not supported for {family.name}; yarn is")
    if rope.raw.get("attention_factor") is not None:
        raise UserError(f"model config: attention_factor is not supported for {family.name}; mscale and mscale_all_dim are")
    if not rope.switch("truncate", True):
        raise UserError(f"model config: truncate false is not supported for {family.name}; true is")
    if bool(rope.raw.get("mscale")) != bool(rope.raw.get("mscale_all_dim")):
        raise UserError(f"model config: mscale and mscale_all_dim of {family.name} must both be given, or neither")


def _covered(scaling: RopeScaling, positions: int) -> int:
    """The tokens for which engines have rotary embeddings: `max_position_embeddings` counts scaled ones except with linear scaling."""
    if scaling["rope_type"] == "linear":
        return int(positions * scaling["factor"])
    if scaling["rope_type"] == "yarn":
        return min(positions, int(scaling["original_max_position_embeddings"] * scaling["factor"]))
    return positions
