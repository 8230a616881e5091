"""Counts the floating-point operations of a training step, to compute a GPU's FLOP/s and utilization."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from mtpctl.families.shape import LayerKind, ModelShape

_FORWARD, _INPUT_GRADIENT, _WEIGHT_GRADIENT = 2, 2, 2
"""Operations per weight and token: one multiplication and one addition in each of the three products."""

type TrunkTraining = Literal["all", "adapter", "none"]
"""The trained weights of the trunk, LM head included."""

_TRUNK_OPS: dict[TrunkTraining, int] = {
    "all": _FORWARD + _INPUT_GRADIENT + _WEIGHT_GRADIENT,
    "adapter": _FORWARD + _INPUT_GRADIENT,
    "none": _FORWARD,
}
"""Operations per weight and token of the trunk. Those of the adapter itself, about 1%, do not count."""

_WITHOUT_SOFTMAX: set[LayerKind] = {"linear_attention", "mamba", "none"}
"""Layers without softmax attention."""

_PEAKS = {"A100": 312e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200 NVL": 835e12, "H200": 989e12, "B200": 2250e12}
"""Dense bf16 FLOP/s from NVIDIA's data sheets. The first entry that matches whole words of the GPU's name is used."""


def peak_flops(gpu: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU by its name (`NVIDIA H200`), or None for an unknown GPU."""
    return next((peak for name, peak in _PEAKS.items() if re.search(rf"\b{name}\b", gpu)), None)


def attention_weights(shape: ModelShape, kind: LayerKind = "full_attention") -> int:
    """Matrix weights of one layer's softmax attention, grouped-query or latent."""
    if (latent := shape.latent) is None:
        queries, kv_heads = shape.heads * (2 if shape.gated_attention else 1), shape.kv_heads_of(kind)
        return shape.hidden * (shape.head_dim * (queries + kv_heads) + shape.value_dim * (shape.heads + kv_heads))
    width = shape.heads * (latent.nope_dim + latent.rope_dim)
    queries = shape.hidden * width if latent.q_rank is None else latent.q_rank * (shape.hidden + width)
    keys_and_values = shape.hidden * (latent.kv_rank + latent.rope_dim) + latent.kv_rank * shape.heads * (
        latent.nope_dim + latent.value_dim
    )
    return queries + keys_and_values + shape.heads * latent.value_dim * shape.hidden


def delta_weights(shape: ModelShape) -> int:
    """Weights of one layer of linear attention, plus the multiplications of its recurrence per token.

    The state is read with the key, updated, and read with the query (Gated DeltaNet, arXiv 2412.06464, equation 10).
    """
    delta = shape.delta
    assert delta is not None
    keys, values = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
    projections = shape.hidden * (2 * keys + 3 * values + 2 * delta.value_heads)
    return projections + delta.conv * (2 * keys + values) + 3 * values * delta.key_dim


def mamba_weights(shape: ModelShape) -> int:
    """Weights of one Mamba-2 layer, plus the multiplications of its recurrence per token.

    The state decays, is updated with the outer product of the input x and B, and is read with C (arXiv 2405.21060, equation 1).
    """
    mamba = shape.mamba
    assert mamba is not None
    projections = shape.hidden * (2 * mamba.inner + mamba.channels + mamba.heads)
    return projections + mamba.conv * mamba.channels + 3 * mamba.inner * mamba.state


def mlp_weights(shape: ModelShape, *, sparse: bool) -> int:
    """Weights that a token uses in one layer's MLP: all of a dense MLP; router, selected and shared experts of an MoE layer."""
    if not sparse or (moe := shape.moe) is None:
        return shape.mlp_matrices * shape.hidden * shape.ffn
    experts = shape.mlp_matrices * shape.hidden * (moe.experts_per_token * moe.ffn + moe.shared_ffn)
    return experts + shape.hidden * (moe.experts + moe.shared_gate)


def trunk_weights(shape: ModelShape) -> int:
    """Weights of the decoder layers that a token uses. Of routed experts, only the selected ones count."""
    mlps = [shape.mlp_of(layer) for layer in range(shape.layers)]
    return sum(_mixer_weights(shape, kind) for kind in shape.layer_kinds) + sum(
        mlp_weights(shape, sparse=mlp == "sparse") for mlp in mlps if mlp != "none"
    )


def _mixer_weights(shape: ModelShape, kind: LayerKind) -> int:
    if kind == "none":
        return 0
    if kind == "mamba":
        return mamba_weights(shape)
    return delta_weights(shape) if kind == "linear_attention" else attention_weights(shape, kind)


def attention_flops(shape: ModelShape, lengths: Sequence[int], kind: LayerKind = "full_attention") -> int:
    """Forward operations of one layer's softmax attention over samples of these lengths; causal masking halves full attention."""
    pair_flops = 2 * shape.heads * (shape.head_dim + shape.value_dim)
    if kind == "sliding_attention" and shape.window is not None:
        # The first tokens of a sample have fewer keys.
        sizes = [(length, min(length, shape.window.size)) for length in lengths]
        return sum(pair_flops * (length * size - size * (size - 1) // 2) for length, size in sizes)
    return sum(pair_flops * length * length // 2 for length in lengths)


def step_flops(
    shape: ModelShape, lengths: Sequence[int], rows: int, mtp_rows: Sequence[int], *, isolated: bool, trunk: TrunkTraining = "all"
) -> int:
    """Forward and backward operations of one step, without recomputation.

    lengths: tokens of each packed sample. rows: number of tokens with a log-prob. mtp_rows: number of drafted tokens of each MTP depth. An
    isolated MTP head computes no gradient of the LM head's weight, and no head does if the LM head is frozen. Of routed experts, only the
    selected ones count. The trunk has no weight gradients with an adapter, and no backward pass if only the drafter is trained.
    """
    all_ops, trunk_ops = _TRUNK_OPS["all"], _TRUNK_OPS[trunk]
    head_ops = all_ops - _WEIGHT_GRADIENT if isolated or trunk != "all" else all_ops
    drafter_passes, drafter_weights = _drafter_cost(shape, len(mtp_rows))
    head_weights = shape.hidden * shape.vocab
    flops = sum(lengths) * (trunk_ops * trunk_weights(shape) + all_ops * drafter_weights)
    flops += (1 if trunk == "none" else 3) * _attention_of_layers(shape, lengths, shape.layer_kinds)
    flops += 3 * _attention_of_layers(shape, lengths, [shape.mtp_kind] * drafter_passes)
    return flops + head_weights * (trunk_ops * rows + head_ops * sum(mtp_rows))


def _attention_of_layers(shape: ModelShape, lengths: Sequence[int], kinds: Sequence[LayerKind]) -> int:
    """Forward operations of softmax attention in layers of these kinds."""
    return sum(kinds.count(kind) * attention_flops(shape, lengths, kind) for kind in set(kinds) - _WITHOUT_SOFTMAX)


def _drafter_cost(shape: ModelShape, depths: int) -> tuple[int, int]:
    """Per token: passes through a drafter layer, and weights used in total."""
    if (dflash := shape.dflash) is None or not depths:
        sparse = shape.moe is not None and not (shape.mtp is not None and shape.mtp.dense)
        layer = attention_weights(shape, shape.mtp_kind) + mlp_weights(shape, sparse=sparse)
        return depths, depths * (layer + 2 * shape.hidden * shape.hidden)
    passes = dflash.layers * (depths + 1)
    layer = attention_weights(shape) + 3 * shape.hidden * dflash.ffn
    # Each layer's queries, keys and values of the context, and the projection that computes the context from the trunk's states.
    context = dflash.layers * shape.hidden * shape.head_dim * (shape.heads + 2 * shape.kv_heads)
    return passes, passes * layer + context + len(dflash.boundaries) * shape.hidden * shape.hidden
