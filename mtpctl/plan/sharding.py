"""How many of a model's parameters one rank holds under a parallel layout."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from math import prod

from mtpctl import families
from mtpctl.families import ModelShape
from mtpctl.recipe.schema import ParallelConfig

# Held whole by every tensor-parallel rank: norms, routers, the small gates, and what feeds a latent.
_REPLICATED = re.compile(
    r"(?:norm|layernorm|mlp\.gate|e_score_correction_bias|shared_expert_gate|q_a_proj|kv_a_proj_with_mqa|o_proj\.bias|down_proj\.bias)(?:\.weight)?$"
)
_LAYER = re.compile(r"\.layers\.([0-9]+)\.")


@dataclass(frozen=True, slots=True)
class Stage:
    """What one rank of a pipeline stage holds: decoder layers, and parameters of trunk and MTP layers."""

    layers: range
    trunk: int
    mtp: int
    has_head: bool

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.trunk + self.mtp


def layers_of_stages(layers: int, parallel: ParallelConfig) -> list[range]:
    """Decoder layers of each pipeline stage: as laid out, else even."""
    counts = parallel.pp_layout or [layers // parallel.pp] * parallel.pp
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return [range(start, start + n) for start, n in zip(starts, counts, strict=True)]


def stages(shape: ModelShape, parallel: ParallelConfig, *, mtp: bool, only: Container[str] | None = None) -> list[Stage]:
    """Parameters of one rank, stage by stage.

    The first stage has the embedding; the last the final norm, the head and the MTP layers, and its own copy of the embedding
    where the MTP layers or a tied head read it. `mtp=False` leaves the MTP layers out, `only` all but the tensors of these names.
    """
    same, whole = families.aliases(shape), families.tensors(shape)
    embedding = f"{shape.prefix}embed_tokens.weight"
    splits = layers_of_stages(shape.layers, parallel)
    held = [[0, 0] for _ in splits]
    for name, size in whole.items():
        if name in same or (only is not None and name not in only):
            continue
        draft = families.section_of(name, shape) == "draft"
        if draft and not mtp:
            continue
        layer = _LAYER.search(name)
        if draft or (layer is None and name != embedding):
            stage = len(splits) - 1
        elif layer is None:
            stage = 0
        else:
            stage = next(i for i, split in enumerate(splits) if int(layer[1]) in split)
        held[stage][draft] += _of_one_rank(name, prod(size), parallel)
    copied = len(splits) > 1 and ((mtp and shape.mtp_layers) or shape.tied)
    if copied and (only is None or embedding in only):
        held[-1][0] += _of_one_rank(embedding, prod(whole[embedding]), parallel)
    return [Stage(split, trunk, draft, i == len(splits) - 1) for i, (split, (trunk, draft)) in enumerate(zip(splits, held, strict=True))]


def _of_one_rank(name: str, numel: int, parallel: ParallelConfig) -> int:
    if ".mlp.experts." in name:
        return -(-numel // parallel.tp) // parallel.ep
    return numel if _REPLICATED.search(name) else -(-numel // parallel.tp)
