"""Counts the parameters of one rank under a parallel layout."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

from mtpctl.errors import UserError
from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import aliases, section_of, tensor_shapes
from mtpctl.recipe.parallel import ParallelConfig

# Replicated over tensor-parallel ranks: norms, routers, small gates, and the down-projections of latent attention.
_REPLICATED = re.compile(
    r"(?:norm|layernorm|pre_fc_norm_(?:embedding|hidden)|mlp\.gate|e_score_correction_bias|shared_expert_gate|q_a_proj|kv_a_proj_with_mqa)"
    r"(?:\.0)?(?:\.weight)?$"
)
_EXPERT = ".mlp.experts."
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
    skipped, tensors = aliases(shape), tensor_shapes(shape)
    embedding = f"{shape.prefix}embed_tokens.weight"
    ends = list(accumulate(stage_layers(shape.layers, depths, parallel), initial=0))
    splits = [range(start, end) for start, end in pairwise(ends)]
    counts, experts = ([[0, 0] for _ in splits] for _ in range(2))
    for name, size in tensors.items():
        if name in skipped or (only is not None and name not in only):
            continue
        draft = section_of(name, shape) == "draft"
        if draft and not depths:
            continue
        layer = _LAYER.search(name)
        if draft or (layer is None and name != embedding):
            stage = len(splits) - 1
        elif layer is None:
            stage = 0
        else:
            stage = next(i for i, split in enumerate(splits) if int(layer[1]) in split)
        numel = _of_one_rank(name, prod(size), parallel)
        counts[stage][draft] += numel
        experts[stage][draft] += numel if _EXPERT in name else 0
    copied = len(splits) > 1 and (depths or shape.tied)
    if copied and (only is None or embedding in only):
        counts[-1][0] += _of_one_rank(embedding, prod(tensors[embedding]), parallel)
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


def _of_one_rank(name: str, numel: int, parallel: ParallelConfig) -> int:
    if _EXPERT in name:
        return -(-numel // expert_tp(parallel)) // parallel.ep
    return numel if _REPLICATED.search(name) else -(-numel // parallel.tp)
