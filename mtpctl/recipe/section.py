"""The base class of recipe sections, the types of their fields, and the parallel layout, which several sections contain."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from mtpctl.families.shape import ModelShape, tp_divides


def _reject_bool(value: object) -> object:
    """Reject booleans, which Python accepts as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number, got {str(value).lower()}")
    return value


Int = Annotated[int, BeforeValidator(_reject_bool)]
Float = Annotated[float, BeforeValidator(_reject_bool)]
PositiveInt = Annotated[Int, Field(gt=0)]
PositiveFloat = Annotated[Float, Field(gt=0)]
NonNegativeInt = Annotated[Int, Field(ge=0)]
NonNegativeFloat = Annotated[Float, Field(ge=0)]
Fraction = Annotated[Float, Field(ge=0, le=1)]
HomePath = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path or a hub id. A leading `~` is expanded when the recipe is loaded."""


class Section(BaseModel):
    """Base of all sections. Unknown keys, and values that cannot be converted to their type, are errors."""

    model_config = ConfigDict(extra="forbid", validate_default=True, frozen=True, populate_by_name=True, allow_inf_nan=False)


Complaints = Iterator[str]
"""Result of a check: one line per mistake, which begins with the recipe field and ends with the fix."""


def divisors_text(count: int) -> str:
    """The divisors of `count`, for a message; only the first eight."""
    return format_numbers([n for n in range(1, count + 1) if count % n == 0])


def format_numbers(numbers: list[int]) -> str:
    """The first eight of the numbers, for a message."""
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")


class ParallelConfig(Section):
    tp: PositiveInt = Field(1, description="Tensor-parallel ranks.")
    pp: PositiveInt = Field(1, description="Pipeline-parallel ranks.")
    cp: PositiveInt = Field(1, description="Context-parallel ranks.")
    ep: PositiveInt = Field(1, description="Expert-parallel ranks.")
    dp: PositiveInt = Field(1, description="Data-parallel ranks.")
    sequence_parallel: bool = Field(False, description="Split activations outside the matrix products over the tp ranks.")
    pp_layout: list[NonNegativeInt] | None = Field(None, description="Decoder layers per pipeline stage; default: even, MTP on the last.")

    @property
    def world_size(self) -> int:
        """Total number of ranks. Expert parallelism adds none: experts are distributed over the ranks of a stage."""
        return self.tp * self.pp * self.cp * self.dp

    def dp_rank(self, rank: int) -> int:
        """The data-parallel rank of a rank, in Megatron's order: tp, cp, dp, pp."""
        return rank // (self.tp * self.cp) % self.dp


def check_parallel(parallel: ParallelConfig, shape: ModelShape, field: str) -> Complaints:
    """Report splits that Megatron does not support for this model. `field` is the section's name in messages.

    A vocabulary that tp does not divide is padded. If there are fewer key-value heads than ranks, neighboring ranks share one.
    """
    counts = shape.tp_counts
    counts |= {"ffn width": shape.ffn} if shape.ffn else {}
    if shape.moe and parallel.ep == 1:  # with ep, experts are not split
        counts |= {"expert ffn width": shape.moe.ffn}
    yield from check_divides(parallel.tp, counts, f"{field}.tp")
    if parallel.sequence_parallel and parallel.tp == 1:
        yield f"{field}.sequence_parallel: splits over tensor-parallel ranks; set it to false, or tp above 1"
    if parallel.pp_layout is not None:
        if len(parallel.pp_layout) != parallel.pp or sum(parallel.pp_layout) != shape.layers:
            yield f"{field}.pp_layout: must list {parallel.pp} stages with {shape.layers} layers in total, got {list(parallel.pp_layout)}"
    elif parallel.pp > shape.layers:
        yield f"{field}.pp: {parallel.pp} stages for {shape.layers} layers; set at most {shape.layers}"
    if shape.delta is not None and not shape.delta.key_heads % parallel.tp:
        # Context-parallel ranks split linear attention by its heads.
        heads = {
            "linear key heads per tensor-parallel rank": shape.delta.key_heads // parallel.tp,
            "linear value heads per tensor-parallel rank": shape.delta.value_heads // parallel.tp,
        }
        yield from check_divides(parallel.cp, heads, f"{field}.cp")
    if shape.mamba is not None and not shape.mamba.groups % parallel.tp:
        # Context-parallel ranks split Mamba layers by their groups.
        groups = {"Mamba groups per tensor-parallel rank": shape.mamba.groups // parallel.tp}
        yield from check_divides(parallel.cp, groups, f"{field}.cp")
    if parallel.ep > 1:
        if shape.moe is None:
            yield f"{field}.ep: the model has no experts; set it to 1"
        else:
            ranks = {"experts": shape.moe.experts, "data- and context-parallel ranks": parallel.dp * parallel.cp}
            yield from check_divides(parallel.ep, ranks, f"{field}.ep")
    if shape.moe is not None and parallel.tp > 1 and not parallel.sequence_parallel:
        yield f"{field}.sequence_parallel: experts with tp: {parallel.tp} need it; set it to true"


def check_divides(number: int, counts: dict[str, int], field: str) -> Complaints:
    """Report a `number` that does not fit one of `counts` (see `tp_divides`). The message lists numbers that fit all."""
    for name, count in counts.items():
        if not tp_divides(number, name, count):
            fitting = [n for n in range(1, max(counts.values()) + 1) if all(tp_divides(n, *item) for item in counts.items())]
            yield f"{field}: {number} does not divide {count} {name}; {format_numbers(fitting)} fit"
            return
