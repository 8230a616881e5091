"""Counts the parameters of one rank under a parallel layout."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from mtpctl.errors import UserError
from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import aliases, section_of, tensor_shapes
from mtpctl.recipe.parallel import ParallelConfig

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

    trunk_experts, mtp_experts: the number of these that belong to routed experts.
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
            raise UserError(f"train.parallel.pp_layout: {parallel.pp_layout} must name {parallel.pp} stages with {layers} layers in all")
        return parallel.pp_layout
    if parallel.pp == 1:
        return [layers]
    if parallel.pp > layers:
        raise UserError(f"train.parallel.pp: {parallel.pp} stages for {layers} layers; take at most {layers}")
    last = max(0, (layers + depths) // parallel.pp - depths)
    each, more = divmod(layers - last, parallel.pp - 1)
    return [each + (stage < more) for stage in range(parallel.pp - 1)] + [last]


def stages(shape: ModelShape, parallel: ParallelConfig, *, depths: int, only: Container[str] | None = None) -> list[Stage]:
    """Count the parameters of one rank of each pipeline stage.

    The first stage has the embedding. The last stage has the final norm, the LM head, the MTP layers, and a copy of the embedding if the
    MTP layers or a tied head read it. depths: number of MTP depths; 0 excludes the MTP layers. only: names of the tensors to count.
    """
    # No tensor depends on the positions, whose scaling is a dict, which cannot be a key of the cache.
    groups = _tensor_groups(replace(shape, rope_scaling=None)) if only is None else _grouped(shape, only)
    ends = list(accumulate(stage_layers(shape.layers, depths, parallel), initial=0))
    splits = [range(start, end) for start, end in pairwise(ends)]
    stage_of = {layer: number for number, split in enumerate(splits) for layer in split}
    counts, experts = ([[0, 0] for _ in splits] for _ in range(2))
    for group, tensors in groups.items():
        if group.draft and not depths:
            continue
        if group.embedding:
            stage = 0
        elif group.draft or group.layer is None:
            stage = len(splits) - 1
        else:
            stage = stage_of[group.layer]
        numel = tensors * _of_one_rank(group, parallel)
        counts[stage][group.draft] += numel
        experts[stage][group.draft] += numel if group.expert else 0
        # The MTP layers and a tied head read a copy.
        if group.embedding and len(splits) > 1 and (depths or shape.tied):
            counts[-1][0] += numel
    parts = zip(splits, counts, experts, strict=True)
    return [
        Stage(split, trunk, mtp, trunk_experts, mtp_experts, has_head=split is splits[-1])
        for split, (trunk, mtp), (trunk_experts, mtp_experts) in parts
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
    return _grouped(shape, None)


def _grouped(shape: ModelShape, only: Container[str] | None) -> Counter[_Group]:
    skipped = aliases(shape)
    groups: Counter[_Group] = Counter()
    for name, size in tensor_shapes(shape).items():
        if name in skipped or (only is not None and name not in only):
            continue
        expert, layer = _EXPERT in name, _LAYER.search(name)
        draft = section_of(name, shape) == "draft"
        number = None if layer is None or draft else int(layer[1])
        embedding = name == shape.embedding_name
        groups[_Group(draft, number, embedding, expert, not expert and _REPLICATED.search(name) is not None, prod(size))] += 1
    return groups


def _of_one_rank(group: _Group, parallel: ParallelConfig) -> int:
    if group.expert:
        return -(-group.numel // expert_tp(parallel)) // parallel.ep
    return group.numel if group.replicated else -(-group.numel // parallel.tp)
