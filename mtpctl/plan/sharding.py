"""Counts one rank's parameters under a parallel layout, and the elements that its layers save for the backward pass."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import comb, prod
from typing import NamedTuple

from mtpctl.errors import UserError
from mtpctl.families.shape import MambaShape, ModelShape
from mtpctl.families.tensors import aliases, section_of, tensor_shapes
from mtpctl.recipe.section import ParallelConfig

# Replicated over tensor-parallel ranks: norms, routers, small gates, and the down-projections of latent attention.
_REPLICATED = re.compile(
    r"(?:(?<!mixer\.)norm|layernorm|norm_f|pre_fc_norm_(?:embedding|hidden)|(?:mlp|mixer)\.gate|e_score_correction_bias|shared_expert_gate|q_a_proj|kv_a_proj_with_mqa)"
    r"(?:\.0)?(?:\.weight)?$"
)
_EXPERT = ".experts."
_LAYER = re.compile(r"\.layers\.([0-9]+)\.")


@dataclass(frozen=True, slots=True)
class Stage:
    """One rank of a pipeline stage: its decoder layers, and its number of parameters in the trunk and the MTP layers.

    trunk_experts, mtp_experts: the parameters of routed experts, which `trunk` and `mtp` include.
    """

    layers: range
    trunk: int
    mtp: int
    trunk_experts: int
    mtp_experts: int
    has_head: bool

    @property
    def parameters(self) -> int:
        return self.trunk + self.mtp


def stage_layers(layers: int, depths: int, parallel: ParallelConfig) -> list[int]:
    """Number of decoder layers of each pipeline stage: `pp_layout`, or an even split that counts MTP depths as layers of the last stage.

    Raises UserError if `pp_layout` does not fit `pp` stages and `layers` layers, or if there are more stages than layers.
    """
    if parallel.pp_layout is not None:
        if len(parallel.pp_layout) != parallel.pp or sum(parallel.pp_layout) != layers:
            raise UserError(f"train.parallel.pp_layout: {parallel.pp_layout} must list {parallel.pp} stages with {layers} layers in total")
        return parallel.pp_layout
    if parallel.pp == 1:
        return [layers]
    if parallel.pp > layers:
        raise UserError(f"train.parallel.pp: {parallel.pp} stages for {layers} layers; set it to at most {layers}")
    last_stage = max(0, (layers + depths) // parallel.pp - depths)
    per_stage, remainder = divmod(layers - last_stage, parallel.pp - 1)
    return [per_stage + (stage < remainder) for stage in range(parallel.pp - 1)] + [last_stage]


def stages(shape: ModelShape, parallel: ParallelConfig, *, depths: int, only: Container[str] | None = None) -> list[Stage]:
    """Count the parameters of one rank of each pipeline stage.

    The first stage has the embedding. The last stage has the final norm, the LM head, the MTP layers, and a copy of the embedding if the
    MTP layers or a tied head read it. depths: number of MTP depths; 0 excludes the MTP layers. only: names of the tensors to count.
    """
    # `rope_scaling` is a dict, which cannot be part of a cache key, and no tensor depends on it.
    groups = _tensor_groups(replace(shape, rope_scaling=None)) if only is None else _group_tensors(shape, only)
    boundaries = list(accumulate(stage_layers(shape.layers, depths, parallel), initial=0))
    layer_ranges = [range(start, end) for start, end in pairwise(boundaries)]
    stage_of = {layer: number for number, layers in enumerate(layer_ranges) for layer in layers}
    # Per stage: the trunk's count, and that of the MTP layers.
    counts = [[0, 0] for _ in layer_ranges]
    expert_counts = [[0, 0] for _ in layer_ranges]
    for group, tensors in groups.items():
        if group.draft and not depths:
            continue
        if group.embedding:
            stage = 0
        elif group.draft or group.layer is None:
            stage = len(layer_ranges) - 1
        else:
            stage = stage_of[group.layer]
        numel = tensors * _rank_numel(group, parallel)
        counts[stage][group.draft] += numel
        expert_counts[stage][group.draft] += numel if group.expert else 0
        # The MTP layers and a tied head read a copy.
        if group.embedding and len(layer_ranges) > 1 and (depths or shape.tied):
            counts[-1][0] += numel
    stage_counts = zip(layer_ranges, counts, expert_counts, strict=True)
    return [
        Stage(layers, trunk, mtp, trunk_experts, mtp_experts, has_head=layers is layer_ranges[-1])
        for layers, (trunk, mtp), (trunk_experts, mtp_experts) in stage_counts
    ]


def expert_tp(parallel: ParallelConfig) -> int:
    """Number of tensor-parallel ranks that share an expert; 1 with expert parallelism."""
    return 1 if parallel.ep > 1 else parallel.tp


def optimizer_ranks(parallel: ParallelConfig) -> tuple[int, int]:
    """Number of shards of a distributed optimizer's state: for dense parameters, and for routed experts."""
    copies = parallel.dp * parallel.cp
    return copies, parallel.tp * copies // (expert_tp(parallel) * parallel.ep)


class _Group(NamedTuple):
    """Properties that determine a tensor's stage and its elements per rank. layer: index of the decoder layer."""

    draft: bool
    layer: int | None
    embedding: bool
    expert: bool
    replicated: bool
    numel: int


@lru_cache(maxsize=16)
def _tensor_groups(shape: ModelShape) -> Counter[_Group]:
    """Number of tensors in each group. Cached, because the largest models have 60,000 tensors, and the planner tries many layouts."""
    return _group_tensors(shape, None)


def _group_tensors(shape: ModelShape, only: Container[str] | None) -> Counter[_Group]:
    alias_names = aliases(shape)
    groups: Counter[_Group] = Counter()
    for name, tensor_shape in tensor_shapes(shape).items():
        if name in alias_names or (only is not None and name not in only):
            continue
        expert, layer = _EXPERT in name, _LAYER.search(name)
        draft = section_of(name, shape) == "draft"
        layer_index = None if layer is None or draft else int(layer[1])
        embedding = name == shape.embedding_name
        groups[_Group(draft, layer_index, embedding, expert, not expert and _REPLICATED.search(name) is not None, prod(tensor_shape))] += 1
    return groups


def _rank_numel(group: _Group, parallel: ParallelConfig) -> int:
    if group.expert:
        return -(-group.numel // expert_tp(parallel)) // parallel.ep
    return group.numel if group.replicated else -(-group.numel // parallel.tp)


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


def head_widths(
    shape: ModelShape, parallel: ParallelConfig, depths: int, *, recomputes_drafts: bool, has_candidates: bool
) -> tuple[float, float]:
    """Elements per token of states around the LM head, which are not part of a layer: during the loss, and in the layers' backward pass.

    Every token is assumed to be trained.

    - Kept until the end of the backward pass: the inputs of the final norms, and the rows that the LM head reads, because a failed check of
      the logits reports their first non-finite value, or their maximum.
    - Freed before the layers' backward pass: the final norms' outputs, and the rows' gradients, which are computed with the loss.
    - An MTP depth saves its embedding and its projection's input. If it is recomputed, it has a gradient of the embedding instead.
    - A drafter that reads states of several layers saves them. A loss over a teacher's candidates has separate rows.
    """
    rows, state = shape.hidden, shape.hidden / (parallel.tp if parallel.sequence_parallel else 1)
    gathered = rows if parallel.sequence_parallel else 0
    in_loss, in_backward = 2 * state + 2 * rows + gathered, state + rows
    if has_candidates:
        in_loss, in_backward = in_loss + 2 * rows, in_backward + rows
    if depths:
        depth_in_loss, depth_in_backward = (1, 2) if recomputes_drafts else (5, 4)
        in_loss += len(shape.boundaries) * state + depths * (depth_in_loss * state + 2 * rows)
        in_backward += len(shape.boundaries) * state + depths * (depth_in_backward * state + rows)
    return in_loss, in_backward


def peak_width(shape: ModelShape, parallel: ParallelConfig, layers: range, *, drafter: bool) -> float:
    """Maximum elements per token of one recomputed layer, with its temporaries, among these decoder layers and the drafter's."""
    widths = zip(layer_widths(shape, parallel, layers), _transient_widths(shape, parallel, layers), strict=True)
    peaks = [saved + transient for saved, transient in widths]
    if drafter:
        peaks.append(drafter_width(shape, parallel) + transient_width(shape, parallel))
    return max(peaks, default=0.0)


def peak_transient(shape: ModelShape, parallel: ParallelConfig, layers: range, *, drafter: bool) -> float:
    """Maximum elements per token of a layer's temporaries, among these decoder layers and the drafter's."""
    widths = _transient_widths(shape, parallel, layers)
    if drafter:
        widths.append(transient_width(shape, parallel))
    return max(widths, default=0.0)


def activation_width(shape: ModelShape, parallel: ParallelConfig) -> float:
    """Elements per token that a layer with full attention, and experts if there are any, saves for its backward pass.

    After Korthikanti et al. 2022, section 4, for flash attention (nothing quadratic is saved), grouped queries and a gated MLP. Excludes
    tensors that the backward pass recomputes (`mtpctl.model.layers`).

    - Split over tp only with sequence parallelism: the inputs of both norms, and the parts of latent attention that all heads share.
    - Always split over tp: q, k, v, the attention's output, gate and up.
    - Replicated: the sine and cosine of latent attention (other attention has one table for all layers); three indices and a weight for
      each selected expert; the gathered tokens, if tp splits each expert.
    - With expert parallelism: the tokens from all ranks, one copy per rank that has an expert of the token. Routing is assumed to be even.
    """
    latent, moe = shape.latent, shape.moe
    split_width = 2 * shape.hidden
    if latent:
        split_width += shape.hidden + 2 * ((latent.q_rank or 0) + latent.kv_rank) + latent.rope_dim
    if moe:
        # The normed state, and the router's outputs.
        split_width += shape.hidden + 3 * moe.experts
    routing = _routing_width(shape, parallel) if moe else 0.0
    tables = 4 * latent.rope_dim if latent else 0
    entry_width = split_width / (parallel.tp if parallel.sequence_parallel else 1)
    return entry_width + routing + tables + (attention_width(shape) + 2 * ffn_width(shape)) / parallel.tp


def _received_width(shape: ModelShape, parallel: ParallelConfig) -> float:
    """Elements received from expert-parallel ranks per local token, with even routing.

    A token is sent once to each rank that has one of its experts, with its fp32 probs of the rank's experts.
    """
    moe = shape.moe
    assert moe is not None
    if parallel.ep == 1:
        return 0.0
    remote_experts = moe.experts - moe.experts // parallel.ep
    copies = parallel.ep * (1 - comb(remote_experts, moe.experts_per_token) / comb(moe.experts, moe.experts_per_token))
    return copies * (shape.hidden + 2 * moe.experts / parallel.ep)


def _routing_width(shape: ModelShape, parallel: ParallelConfig) -> float:
    """Elements per token of an MoE layer's indices and weights, received tokens and gathered tokens."""
    moe = shape.moe
    assert moe is not None
    width = 4 * moe.experts_per_token + _received_width(shape, parallel) / parallel.tp
    return width + (shape.hidden if expert_tp(parallel) > 1 else 0)


def _block_width(shape: ModelShape, mamba: MambaShape, layer: int, parallel: ParallelConfig) -> float:
    """Elements per token that one layer of Nemotron-H, a mixer or an MLP without a gate, saves for its backward pass.

    A Mamba-2 layer saves the output of its input projection, the convolution's output before and after the activation, and the scan's
    output before and after the norm. It also saves decays in fp32, and B and C (the state's input and output projections) for every head.
    """
    if shape.mlp_of(layer) == "sparse":
        return _expert_width(shape, parallel)
    kind = shape.layer_kinds[layer]
    if kind == "mamba":
        saved = 3 * mamba.inner + 3 * mamba.channels + 6 * mamba.heads + 2 * mamba.heads * mamba.state
        return _mixer_width(shape, saved, parallel)
    return _mixer_width(shape, attention_width(shape) if kind == "full_attention" else shape.ffn, parallel)


def _mixer_width(shape: ModelShape, split: float, parallel: ParallelConfig) -> float:
    """Elements per token of a layer: the input of its norm, and `split` elements that tp divides."""
    return shape.hidden / (parallel.tp if parallel.sequence_parallel else 1) + split / parallel.tp


def _expert_width(shape: ModelShape, parallel: ParallelConfig) -> float:
    """Elements per token that experts without a gate, with their norm and router, save for their backward pass."""
    assert shape.moe is not None
    router = (shape.hidden + 3 * shape.moe.experts) / (parallel.tp if parallel.sequence_parallel else 1)
    return _mixer_width(shape, ffn_width(shape), parallel) + router + _routing_width(shape, parallel)


def _transient_widths(shape: ModelShape, parallel: ParallelConfig, layers: range) -> list[float]:
    """Elements per token of the temporaries of each of these decoder layers."""
    if shape.mamba is None:
        return [transient_width(shape, parallel)] * len(layers)
    input_width = shape.hidden / (parallel.tp if parallel.sequence_parallel else 1)
    width_of_mlp = {"none": input_width, "dense": input_width + shape.ffn / parallel.tp, "sparse": transient_width(shape, parallel)}
    return [width_of_mlp[shape.mlp_of(layer)] for layer in layers]


def transient_width(shape: ModelShape, parallel: ParallelConfig) -> float:
    """Elements per token of a layer's temporaries, in addition to what it saves: the normed input and the activation's output.

    Routed experts peak in the backward pass of their first product. They then have the rows (copies of their tokens' states), the rows'
    gradients, the product (gate and up) and, with expert parallelism, the received tokens. Routing is assumed to be even.
    """
    width = shape.hidden / (parallel.tp if parallel.sequence_parallel else 1)
    if not shape.moe:
        return width + shape.ffn / parallel.tp
    split = expert_tp(parallel)
    rows = shape.moe.experts_per_token * split / parallel.tp
    routed = rows * (2 * shape.hidden + (shape.mlp_matrices - 1) * shape.moe.ffn / split)
    received = _received_width(shape, parallel) * split / parallel.tp
    return width + routed + received + shape.moe.shared_ffn / parallel.tp


def attention_width(shape: ModelShape) -> float:
    """Elements per token of attention's queries, keys, values and output, and what norms and gates save, before tp splits them."""
    if shape.latent:
        return 2 * shape.heads * (shape.latent.nope_dim + shape.latent.rope_dim + shape.latent.value_dim)
    q, kv = shape.heads * shape.head_dim, max(map(shape.kv_heads_of, shape.layer_kinds)) * shape.head_dim
    # Narrower values are padded for the kernel, and the narrower output is copied.
    padded_output = shape.heads * shape.value_dim if shape.value_dim != shape.head_dim else 0
    # QK norms save the tensor that the heads are split from. An output gate saves itself and its input.
    normed_width = q + 2 * kv + (q if shape.gated_attention else 0)
    saved_norms = normed_width if shape.qk_norm else 0
    saved_gate = 2 * q if shape.gated_attention else 0
    return 2 * q + 2 * kv + padded_output + saved_norms + saved_gate


def ffn_width(shape: ModelShape) -> float:
    """Hidden width of the MLP, or of a token's experts together."""
    moe = shape.moe
    return moe.experts_per_token * moe.ffn + moe.shared_ffn if moe else shape.ffn
