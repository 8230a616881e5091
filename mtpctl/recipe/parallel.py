"""The sections `train.parallel` and `logprob.parallel`: how a model is split over ranks, and which splits Megatron refuses."""

from __future__ import annotations

from pydantic import Field

from mtpctl.families.shape import ModelShape
from mtpctl.recipe.section import Complaints, NonNegativeInt, PositiveInt, Section, listed


class ParallelConfig(Section):
    tp: PositiveInt = Field(1, description="Tensor-parallel ranks.")
    pp: PositiveInt = Field(1, description="Pipeline-parallel ranks.")
    cp: PositiveInt = Field(1, description="Context-parallel ranks.")
    ep: PositiveInt = Field(1, description="Expert-parallel ranks.")
    dp: PositiveInt = Field(1, description="Data-parallel ranks.")
    sequence_parallel: bool = Field(False, description="Split activations outside the matrix products over the tp ranks.")
    pp_layout: list[NonNegativeInt] | None = Field(
        None, description="Decoder layers of each pipeline stage; default: even, MTP layers on the last stage."
    )

    @property
    def world_size(self) -> int:
        """Ranks in all. Expert parallelism reuses the data-parallel ranks."""
        return self.tp * self.pp * self.cp * self.dp

    def dp_rank(self, rank: int) -> int:
        """The data-parallel rank of a rank: Megatron counts tp first, then cp, then dp, then pp."""
        return rank // (self.tp * self.cp) % self.dp


KV_HEADS = "key-value heads"


def parallel_fits(parallel: ParallelConfig, shape: ModelShape, field: str) -> Complaints:
    """Refuse a split of this model that Megatron refuses. `field` is the section's name in messages.

    A vocabulary that tp does not divide is padded, and where there are fewer key-value heads than ranks, neighbours share one.
    """
    counts = {"attention heads": shape.heads, KV_HEADS: shape.kv_heads}
    if shape.delta:
        counts |= {"linear key heads": shape.delta.key_heads, "linear value heads": shape.delta.value_heads}
    counts |= {"ffn width": shape.ffn} if shape.ffn else {}
    if shape.moe and parallel.ep == 1:  # else each is whole
        counts |= {"expert ffn width": shape.moe.ffn}
    yield from divides(parallel.tp, counts, f"{field}.tp")
    if parallel.sequence_parallel and parallel.tp == 1:
        yield f"{field}.sequence_parallel: splits over tensor-parallel ranks; set tp above 1, or false"
    if parallel.pp_layout is not None:
        if len(parallel.pp_layout) != parallel.pp or sum(parallel.pp_layout) != shape.layers:
            yield f"{field}.pp_layout: must name {parallel.pp} stages with {shape.layers} layers in all, got {list(parallel.pp_layout)}"
    elif parallel.pp > shape.layers:
        yield f"{field}.pp: {parallel.pp} stages for {shape.layers} layers; take at most {shape.layers}"
    if shape.delta is not None and not shape.delta.key_heads % parallel.tp:
        # Linear attention is shared among context-parallel ranks by its heads.
        each = {"linear key heads a tensor-parallel rank": shape.delta.key_heads // parallel.tp}
        yield from divides(parallel.cp, each | {"linear value heads": shape.delta.value_heads // parallel.tp}, f"{field}.cp")
    if parallel.ep > 1:
        if shape.moe is None:
            yield f"{field}.ep: the model has no experts; set it to 1"
        else:
            yield from divides(
                parallel.ep, {"experts": shape.moe.experts, "data- and context-parallel ranks": parallel.dp * parallel.cp}, f"{field}.ep"
            )
    if shape.moe is not None and parallel.tp > 1 and not parallel.sequence_parallel:
        yield f"{field}.sequence_parallel: experts with tp: {parallel.tp} need it; set it to true"


def divides(number: int, counts: dict[str, int], field: str) -> Complaints:
    """Refuse a `number` that does not divide one of `counts`; the message lists the numbers that divide all of them."""

    def fits(n: int, what: str) -> bool:
        return counts[what] % n == 0 or (what == KV_HEADS and n % counts[what] == 0)

    for what, count in counts.items():
        if not fits(number, what):
            fitting = [n for n in range(1, max(counts.values()) + 1) if all(fits(n, each) for each in counts)]
            yield f"{field}: {number} does not divide {count} {what}; {listed(fitting)} fit"
            return
