"""The kinds of Nemotron-H's layers in its configs, and the fields that the trainer does not support."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from mtpctl.errors import UserError
from mtpctl.families.shape import LayerKind


class Block(NamedTuple):
    """A kind of layer: its names in transformers 5 and in older configs, its letter in a pattern, and its mixer."""

    name: str
    older: str
    letter: str
    mixer: LayerKind


KINDS = (
    Block("linear_attention", "mamba", "M", "mamba"),
    Block("full_attention", "attention", "*", "full_attention"),
    Block("moe", "moe", "E", "none"),
    Block("mlp", "mlp", "-", "none"),
)

BLOCKS = "layers_block_type"
"""Config field with the kind of each layer. Older configs have a pattern of letters instead."""
_MTP_BLOCKS = "mtp_layers_block_type"
_PATTERNS = {BLOCKS: "hybrid_override_pattern", _MTP_BLOCKS: "mtp_hybrid_override_pattern"}
_SUPPORTED_MTP = ["full_attention", "moe"]
_VALUES = {"mamba_hidden_act": "silu", "mlp_hidden_act": "relu2", "use_conv_bias": True, "n_shared_experts": 1}
"""Config fields, each with the only supported value, which is also the default of engines."""
_INFINITY: tuple[object, ...] = (math.inf, "Infinity", {"__float__": "Infinity"})
"""Infinity, and the ways in which transformers writes it."""


def block_types(config: Mapping[str, object], key: str = BLOCKS) -> list[str]:
    """The kind of each layer, by its name in transformers 5. Raises UserError if the config does not list them."""
    stated, pattern = config.get(key), config.get(_PATTERNS[key])
    if stated is None and isinstance(pattern, str):
        stated = list(pattern)
    if stated is None and key == _MTP_BLOCKS:
        stated = _SUPPORTED_MTP
    names = {spelling: kind.name for kind in KINDS for spelling in kind[:3]}
    if not isinstance(stated, list) or not stated or not all(str(block) in names for block in stated):
        raise UserError(f"model config: {key} must list {', '.join(kind.name for kind in KINDS)} for the layers, got {stated!r}")
    return [names[str(block)] for block in stated]


def mixer_of(block: str) -> LayerKind:
    return next(kind.mixer for kind in KINDS if kind.name == block)


def check_blocks(family: str, config: Mapping[str, object]) -> None:
    """Raise UserError for fields that an engine refuses or computes differently from the trainer."""
    layers, mtp = len(block_types(config)), block_types(config, _MTP_BLOCKS)
    if (stated := config.get("num_hidden_layers")) not in (None, layers):
        raise UserError(f"model config: num_hidden_layers is {stated!r}, but {BLOCKS} has {layers}; make them equal")
    if mtp != _SUPPORTED_MTP:
        raise UserError(f"model config: {_MTP_BLOCKS} {mtp} is not supported for {family}; {_SUPPORTED_MTP} is")
    for key, value in _VALUES.items():
        if (stated := config.get(key)) not in (None, value):
            raise UserError(f"model config: {key} {stated!r} is not supported for {family}; {value!r} is")
    if (limit := config.get("time_step_limit")) is not None and limit not in [[0, each] for each in _INFINITY]:
        raise UserError(f"model config: time_step_limit {limit!r} is not supported for {family}: vLLM ignores it; take it out")
