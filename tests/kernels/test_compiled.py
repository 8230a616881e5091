"""Kernels compile for a card where there is none: Triton's interpreter, which runs them on a CPU, takes more than its compiler does."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from mtpctl.kernels import heads_triton, norm_triton, order_triton, routing_triton, swiglu_triton  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
FLAGS = (False, True)
HEADS = {"QUERIES": 3, "WIDTH": 96, "HALF": 32, "TOKENS": 16, "COLUMNS": 128}
BLOCK = {"TOKENS": 32, "EXPERTS": 64}
CHOICE = {**BLOCK, "K": 4, "COUNTED": True}
ROWS = {"BLOCK": 32, "EXPERTS": 64}
KERNELS = [
    *(
        (kernel, {**HEADS, "GATED": gated, "NORMED": normed, "ROTATED": rotated})
        for kernel in (heads_triton.rotate_heads, heads_triton.rotate_heads_backward)
        for gated, normed, rotated in ((True, True, True), (False, False, True), (False, True, False))
    ),
    (norm_triton.norm, {"BLOCK": 1024}),
    (norm_triton.norm_back, {"BLOCK": 1024}),
    *(
        (
            routing_triton.choose,
            {**CHOICE, "SIGMOID": sigmoid, "OF_ALL": not sigmoid, "BIASED": sigmoid, "REPLAYS": given, "COMPARED": given},
        )
        for sigmoid in FLAGS
        for given in FLAGS
    ),
    *((routing_triton.choose_back, {**BLOCK, "SIGMOID": one, "OF_ALL": False, "ONE": one}) for one in FLAGS),
    (order_triton.count_rows, ROWS),
    (order_triton.sum_counts, {"BLOCKS": 128, "COLUMNS": 32}),
    (order_triton.place_rows, ROWS),
    *((kernel, {"SCALED": True, "BLOCK": 512}) for kernel in (swiglu_triton.swiglu, swiglu_triton.swiglu_backward)),
]
BYTES, WHOLE, LONG, WIDE = "*u8", "*i32", "*i64", "*fp32"
POINTERS = {
    **dict.fromkeys(("cos_ptr", "sin_ptr", "weight_grads_ptr", "logits_ptr", "bias_ptr", "shares_ptr", "logits_grad_ptr"), WIDE),
    **dict.fromkeys(("routes_ptr", "where_ptr"), BYTES),
    **dict.fromkeys(("counts_ptr", "total_ptr", "before_ptr", "row_of_ptr", "token_of_ptr"), WHOLE),
    **dict.fromkeys(("load_ptr", "agreed_ptr", "pair_of_ptr"), LONG),
    "replayed_ptr": "*i16",
}
"""Element types of pointers; all others are to bf16. Numbers are integers, but for these."""
FRACTIONS = ("eps", "offset", "scaling", "lowest")


def types_of(names: list[str], constants: Mapping[str, object]) -> dict[str, str]:
    def of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name.endswith("_ptr"):
            return POINTERS.get(name, "*bf16")
        return "fp32" if name in FRACTIONS else "i32"

    return {name: of(name) for name in names}


@pytest.mark.parametrize(("kernel", "constants"), KERNELS, ids=lambda value: getattr(value, "__name__", None))
def test_a_kernel_compiles_for_hopper(kernel, constants) -> None:
    names = kernel.arg_names
    types = types_of(names, constants)
    source = ASTSource(kernel, types, constexprs={(names.index(name),): value for name, value in constants.items()})
    assert "cubin" in triton.compile(source, target=HOPPER).asm
