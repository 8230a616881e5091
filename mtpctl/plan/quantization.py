"""What a recipe quantizes for its engines, for the dry run and the plan of a sync."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from mtpctl.families.quantization import SCALE, unquantized_modules
from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import tensor_shapes
from mtpctl.plan.buckets import DTYPE_BYTES, section_buckets, wire_tensors
from mtpctl.recipe.model import DTYPES
from mtpctl.recipe.quantization import sent_in_fp8, syncs_both_forms
from mtpctl.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class QuantizationPlan:
    """The weights of engines with `rollout.quantization`.

    Attributes:
        matrices: number of quantized matrices.
        bytes: their values and scales.
        bytes_before: their size unquantized.
        unquantized: kinds of matrices that are not quantized, in addition to embeddings, norms and biases.
        bytes_to_logprob: unquantized weights that each sync sends to the log-prob server as well.
    """

    matrices: int
    bytes: int
    bytes_before: int
    unquantized: tuple[str, ...]
    bytes_to_logprob: int

    def lines(self, size: Callable[[int], str]) -> list[str]:
        """The plan as text. `size` formats bytes."""
        unquantized = ", ".join(("embeddings", "norms", "biases", *self.unquantized))
        lines = [f"fp8: {self.matrices} matrices, {size(self.bytes)} instead of {size(self.bytes_before)}; in bf16: {unquantized}"]
        if self.bytes_to_logprob:
            lines.append(f"the log-prob server gets {size(self.bytes_to_logprob)} of unquantized weights at each sync")
        return lines


def plan_quantization(recipe: Recipe, shape: ModelShape) -> QuantizationPlan | None:
    """The plan of the recipe's quantization; None without one."""
    names = sent_in_fp8(recipe, shape)
    if not names:
        return None
    sizes, dtype = tensor_shapes(shape), DTYPES[recipe.sent_precision]
    sections = section_buckets(recipe, shape)
    names &= {spec.name for section in sections for spec in wire_tensors(shape, section, dtype)}
    specs = [spec for section in sections for spec in wire_tensors(shape, section, dtype, names)]
    quantized = sum(spec.nbytes for spec in specs if spec.name.removesuffix(SCALE) in names)
    plain = sum(spec.nbytes for section in sections for spec in wire_tensors(shape, section, dtype))
    modules = dict.fromkeys(module.rpartition(".")[2] for module in unquantized_modules(shape, quantized=names))
    return QuantizationPlan(
        matrices=len(names),
        bytes=quantized,
        bytes_before=sum(prod(sizes[name]) for name in names) * DTYPE_BYTES[dtype],
        unquantized=tuple(modules),
        bytes_to_logprob=plain if syncs_both_forms(recipe) else 0,
    )
