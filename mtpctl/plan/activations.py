"""Estimates the elements that a layer saves for its backward pass, and the temporaries of computing it."""

from __future__ import annotations

from mtpctl.families.shape import MambaShape, ModelShape
from mtpctl.plan.sharding import expert_tp
from mtpctl.recipe.parallel import ParallelConfig


def layer_widths(shape: ModelShape, parallel: ParallelConfig, layers: range) -> list[float]:
    """Elements per token that each of these decoder layers saves for its backward pass."""
    if (mamba := shape.mamba) is not None:
        return [_block_width(shape, mamba, layer, parallel) for layer in layers]
    return [activation_width(shape, parallel)] * len(layers)


def drafter_width(shape: ModelShape, parallel: ParallelConfig) -> float:
    """Elements per token that one pass through a layer of the drafter saves for its backward pass."""
    if shape.mamba is None:
        return activation_width(shape, parallel)
    # Attention and experts.
    return _mixer_width(shape, attention_width(shape), parallel) + _expert_width(shape, parallel)


def peak_width(shape: ModelShape, parallel: ParallelConfig, layers: range, *, drafter: bool) -> float:
    """Maximum elements per token of one recomputed layer, with its temporaries, among these decoder layers and the drafter's."""
    widths = zip(layer_widths(shape, parallel, layers), _transients(shape, parallel, layers), strict=True)
    peaks = [saved + transient for saved, transient in widths]
    if drafter:
        peaks.append(drafter_width(shape, parallel) + transient_width(shape, parallel))
    return max(peaks, default=0.0)


def peak_transient(shape: ModelShape, parallel: ParallelConfig, layers: range, *, drafter: bool) -> float:
    """Maximum elements per token of a layer's temporaries, among these decoder layers and the drafter's."""
    return max([*_transients(shape, parallel, layers), *([transient_width(shape, parallel)] if drafter else [])], default=0.0)


def activation_width(shape: ModelShape, parallel: ParallelConfig) -> float:
    """Elements per token that a layer with full attention, and experts if there are any, saves for its backward pass.

    After Korthikanti et al. 2022, section 4, for flash attention (nothing quadratic is saved), grouped queries and a gated MLP, minus the
    tensors that the backward pass recomputes (`mtpctl.model.layers`).

    - Split over tp only with sequence parallelism: the inputs of both norms, and the parts of latent attention that all heads share.
    - Always split over tp: q, k, v, the attention's output, gate and up.
    - Replicated: the sine and cosine of latent attention (other attention has one table for all layers), three indices and a weight for
      each selected expert, and the tokens that ranks gather if tp splits each expert.
    - With expert parallelism also the tokens from other ranks, at most one copy per rank, assumed to be as many as this rank sends.
    """
    latent, moe = shape.latent, shape.moe
    entry = 2 * shape.hidden
    if latent:
        entry += shape.hidden + 2 * ((latent.q_rank or 0) + latent.kv_rank) + latent.rope_dim
    if moe:
        # The normed state, and the router's outputs.
        entry += shape.hidden + 3 * moe.experts
    routing = _routing_width(shape, parallel) if moe else 0.0
    tables = 4 * latent.rope_dim if latent else 0
    entry_width = entry / (parallel.tp if parallel.sequence_parallel else 1)
    return entry_width + routing + tables + (attention_width(shape) + 2 * ffn_width(shape)) / parallel.tp


def _received(shape: ModelShape, parallel: ParallelConfig) -> int:
    """Tokens from expert-parallel ranks for each token of this rank, with even routing: a token travels once to each rank at most."""
    assert shape.moe is not None
    return min(shape.moe.experts_per_token, parallel.ep) if parallel.ep > 1 else 0


def _routing_width(shape: ModelShape, parallel: ParallelConfig) -> float:
    """Elements per token of an MoE layer's indices and weights, received tokens and gathered tokens."""
    moe = shape.moe
    assert moe is not None
    width = 4 * moe.experts_per_token + _received(shape, parallel) * shape.hidden / parallel.tp
    return width + (shape.hidden if expert_tp(parallel) > 1 else 0)


def _block_width(shape: ModelShape, mamba: MambaShape, layer: int, parallel: ParallelConfig) -> float:
    """Elements per token that one layer of Nemotron-H, a mixer or an MLP without a gate, saves for its backward pass.

    A Mamba-2 layer saves the output of its input projection, the convolution before and after its activation, decays in fp32, the input
    and output projections of the state for every head, and the scan's output before and after the norm.
    """
    if shape.mlp_of(layer) == "sparse":
        return _expert_width(shape, parallel)
    kind = shape.layer_kinds[layer]
    if kind == "mamba":
        saved = 3 * mamba.inner + 3 * mamba.channels + 6 * mamba.heads + 2 * mamba.heads * mamba.state
        return _mixer_width(shape, saved, parallel)
    return _mixer_width(shape, attention_width(shape) if kind == "full_attention" else shape.ffn, parallel)


def _mixer_width(shape: ModelShape, split: float, parallel: ParallelConfig) -> float:
    """Elements per token of the input of a layer's norm, and of its part that tp splits."""
    return shape.hidden / (parallel.tp if parallel.sequence_parallel else 1) + split / parallel.tp


def _expert_width(shape: ModelShape, parallel: ParallelConfig) -> float:
    """Elements per token that experts without a gate, with their norm and router, save for their backward pass."""
    assert shape.moe is not None
    router = (shape.hidden + 3 * shape.moe.experts) / (parallel.tp if parallel.sequence_parallel else 1)
    return _mixer_width(shape, ffn_width(shape), parallel) + router + _routing_width(shape, parallel)


def _transients(shape: ModelShape, parallel: ParallelConfig, layers: range) -> list[float]:
    """Elements per token of the temporaries of each of these decoder layers."""
    if shape.mamba is None:
        return [transient_width(shape, parallel)] * len(layers)
    normed = shape.hidden / (parallel.tp if parallel.sequence_parallel else 1)
    of_mlp = {"none": normed, "dense": normed + shape.ffn / parallel.tp, "sparse": transient_width(shape, parallel)}
    return [of_mlp[shape.mlp_of(layer)] for layer in layers]


def transient_width(shape: ModelShape, parallel: ParallelConfig) -> float:
    """Elements per token of a layer's temporaries, in addition to what it saves: the normed input and the activation's output.

    Routed experts peak in the backward pass of their first product, with rows (copies of their tokens' states), the rows' gradients, and
    the product (gate and up); with expert parallelism also with the received tokens. Routing is assumed to be even.
    """
    width = shape.hidden / (parallel.tp if parallel.sequence_parallel else 1)
    if not shape.moe:
        return width + shape.ffn / parallel.tp
    split = expert_tp(parallel)
    rows = shape.moe.experts_per_token * split / parallel.tp
    routed = rows * (2 * shape.hidden + (shape.mlp_matrices - 1) * shape.moe.ffn / split)
    received = _received(shape, parallel) * split / parallel.tp * shape.hidden
    return width + routed + received + shape.moe.shared_ffn / parallel.tp


def attention_width(shape: ModelShape) -> float:
    """Elements per token of attention's queries, keys, values and output, and what norms and gates save, before a split over tp."""
    if shape.latent:
        return 2 * shape.heads * (shape.latent.nope_dim + shape.latent.rope_dim + shape.latent.value_dim)
    q, kv = shape.heads * shape.head_dim, max(map(shape.kv_heads_of, shape.layer_kinds)) * shape.head_dim
    # Narrower values are padded for the kernel, and the narrower output is copied.
    copied = shape.heads * shape.value_dim if shape.value_dim != shape.head_dim else 0
    # QK norms save the tensor that the heads are split from. An output gate saves itself and its input.
    mixed = q + 2 * kv + (q if shape.gated_attention else 0)
    return 2 * q + 2 * kv + copied + (mixed if shape.qk_norm else 0) + (2 * q if shape.gated_attention else 0)


def ffn_width(shape: ModelShape) -> float:
    """Hidden width of the MLP, or of a token's experts together."""
    moe = shape.moe
    return moe.experts_per_token * moe.ffn + moe.shared_ffn if moe else shape.ffn
