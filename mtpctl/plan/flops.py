"""Count the floating-point operations of a training step, from which FLOP/s and the share of a card's peak are computed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mtpctl.families.shape import ModelShape

_FORWARD, _INPUT_GRADIENT, _WEIGHT_GRADIENT = 2, 2, 2
"""Operations for each weight and token: one multiply and one add in each of the three products."""


_PEAKS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "B200": 2250e12,
}
"""Dense bf16 FLOP/s by NVIDIA's data sheets. The first name that a card's name contains as whole words is taken."""


def card_peak(card: str) -> float | None:
    """Dense bf16 FLOP/s of a card by its name (`NVIDIA H200`), or None for one that is not known here."""
    return next((peak for name, peak in _PEAKS.items() if re.search(rf"\b{name}\b", card)), None)


def countable(shape: ModelShape) -> bool:
    """Whether `step_flops` can count the model: all its layers are dense attention layers."""
    return not (shape.moe or shape.latent or shape.delta)


def layer_weights(shape: ModelShape) -> int:
    """Weights of one dense decoder layer that take part in matrix products."""
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    return attention + 3 * shape.hidden * shape.ffn


def attention_flops(shape: ModelShape, lengths: Sequence[int]) -> int:
    """Forward operations of one layer's causal attention over samples of these lengths: scores and values, half of the square."""
    return sum(2 * 2 * shape.heads * shape.head_dim * length * length // 2 for length in lengths)


def step_flops(shape: ModelShape, lengths: Sequence[int], rows: int, mtp_rows: Sequence[int], *, isolated: bool) -> int:
    """Forward and backward operations of one step, recomputation not counted.

    lengths: tokens of each packed sample; rows: tokens whose log-prob is taken; mtp_rows: the same for each MTP depth.
    An isolated MTP head computes no gradient of the LM head's weight. Embedding look-ups are no products.

    Raises ValueError for a family whose layers are not all dense attention layers.
    """
    if not countable(shape):
        raise ValueError(f"operations of {shape.family} are not counted here: dense attention layers alone are")
    whole = _FORWARD + _INPUT_GRADIENT + _WEIGHT_GRADIENT
    tokens = sum(lengths)
    layers = shape.layers + len(mtp_rows)
    flops = whole * tokens * layers * layer_weights(shape)
    flops += 3 * layers * attention_flops(shape, lengths)
    flops += whole * tokens * len(mtp_rows) * 2 * shape.hidden * shape.hidden
    flops += whole * rows * shape.hidden * shape.vocab
    draft = whole - _WEIGHT_GRADIENT if isolated else whole
    return flops + sum(draft * n * shape.hidden * shape.vocab for n in mtp_rows)
