"""Triton kernels compile for sm_90 without a GPU. Triton's interpreter accepts code that its compiler rejects."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from mtpctl.kernels import (  # noqa: E402
    activations,
    block_fp8,
    exact_delta,
    exact_experts,
    invariant,
    messages,
    norm,
    qkv,
    routing,
    rows,
    scaling,
    triton_backend,
)

HOPPER = GPUTarget("cuda", 90, 32)
FLAGS = (False, True)
HEADS = {"QUERIES": 3, "WIDTH": 96, "VALUE_WIDTH": 64, "HALF": 32, "TOKENS": 16, "COLUMNS": 128}
BLOCK = {"TOKENS": 32, "EXPERTS": 64}
CHOICE = {**BLOCK, "K": 4, "COUNTED": True}
ROWS = {"BLOCK": 32, "EXPERTS": 64, "UNROUTED": 0}
KERNELS = [
    *(
        (kernel, {**HEADS, "GATED": gated, "NORMED": normed, "ROTATED": rotated})
        for kernel in (qkv.split_heads_kernel, qkv.split_heads_backward_kernel)
        for gated, normed, rotated in ((True, True, True), (False, False, True), (False, True, False))
    ),
    (norm.rms_norm_kernel, {"BLOCK": 1024}),
    (norm.rms_norm_backward_kernel, {"BLOCK": 1024}),
    *(
        (
            routing.route_kernel,
            {**CHOICE, "SIGMOID": sigmoid, "OF_ALL": not sigmoid, "BIASED": sigmoid, "REPLAYS": replays, "COMPARED": replays},
        )
        for sigmoid in FLAGS
        for replays in FLAGS
    ),
    *((routing.route_backward_kernel, {**BLOCK, "SIGMOID": one, "OF_ALL": False, "ONE": one}) for one in FLAGS),
    (rows.count_rows_kernel, ROWS),
    (rows.count_destinations_kernel, {"BLOCK": 64, "LOCAL": 64}),
    (rows.sum_counts_kernel, {"BLOCKS": 128, "COLUMNS": 32}),
    (rows.place_rows_kernel, ROWS),
    *(
        (messages.gather_kernel, {"GROUP": group, "GROUP_BLOCK": group, "MASKED": group > 1, "UNROUTED": -1.0, "BLOCK": 1024})
        for group in (1, 64)
    ),
    *((messages.sum_kernel, {"K": 3, "GROUP": group, "PROBS": 128, "BLOCK": 1024}) for group in (1, 64)),
    (rows.sum_rows_kernel, {"K": 3, "BLOCK": 1024}),
    *(
        (triton_backend.draft_sums_kernel, {"BN": 256, "TILES": 4, "STEPS": 8, "LOSS": loss})
        for loss in ("soft_ce", "kl", "tv", "e2e_tv", "e2e_greedy")
    ),
    *(
        (triton_backend.draft_grads_kernel, {"BN": 256, "TILES": 4, "HAS_TEACHER": teacher, "HAS_GAIN": gained, "GREEDY": greedy})
        for teacher, gained, greedy in ((True, False, False), (False, True, False), (True, True, False), (True, True, True))
    ),
    *(
        (getattr(activations, f"{name}_kernel"), {"SCALED": True, "BLOCK": 512})
        for name in ("swiglu", "swiglu_backward", "squared_relu", "squared_relu_backward")
    ),
    (scaling.scaled_kernel, {"SHARED": False, "ADDED": True, "ROWS": 32, "BLOCK": 64}),
    (scaling.scaled_backward_kernel, {"SHARED": True, "ROWS": 32, "BLOCK": 64}),
    (invariant.rotate_kernel, {"HEADS": 3, "WIDTH": 96, "HALF": 32, "TOKENS": 16, "COLUMNS": 128}),
    *(
        (invariant.attention_kernel, {"PER_GROUP": 4, "WIDTH": 128, "BLOCK_WIDTH": 128, "PAGE": page, "BM": 64, "BN": 64, "SUMS": not page})
        for page in (0, 16)
    ),
    (invariant.mass_kernel, {"BLOCK": 4096}),
    (exact_delta.convolve_kernel, {"TAPS": 4, "BLOCK": 128}),
    (exact_delta.recurrence_kernel, {"HEADS": 32, "SHARED": 2, "DEPTH": 128, "WIDTH": 128, "BLOCK_DEPTH": 128, "BLOCK_WIDTH": 32}),
    *((exact_experts.chosen_probs_kernel, {**BLOCK, "OF_ALL": over_all}) for over_all in FLAGS),
    *((block_fp8.quantize_kernel, {"MAX_MATRICES": 128, "IS_ALIGNED": aligned, "BLOCK": 128}) for aligned in FLAGS),
]
BYTES, WHOLE, LONG, WIDE = "*u8", "*i32", "*i64", "*fp32"
POINTERS = {
    **dict.fromkeys(
        ("cos_ptr", "sin_ptr", "weight_grads_ptr", "logits_ptr", "bias_ptr", "probs_ptr", "row_probs_ptr", "logits_grad_ptr"), WIDE
    ),
    **dict.fromkeys(("routes_ptr", "where_ptr", "mask_ptr"), BYTES),
    **dict.fromkeys(("counts_ptr", "total_ptr", "before_ptr", "row_of_ptr", "token_of_ptr"), WHOLE),
    **dict.fromkeys(("load_ptr", "agreed_ptr", "pair_of_ptr"), LONG),
    "replayed_ptr": "*i16",
    # Of bitwise operations.
    **dict.fromkeys(("starts_ptr", "lengths_ptr", "table_ptr", "ends_ptr"), WHOLE),
    **dict.fromkeys(("lse_ptr", "top_ptr"), WIDE),
    **dict.fromkeys(("mass_ptr", "position_ptr"), LONG),
    **dict.fromkeys(("slots_ptr", "accepted_ptr"), WHOLE),
    "state_ptr": WIDE,
    "matrices_ptr": LONG,
    # Of drafts.
    **dict.fromkeys(("draft_ptr", "teacher_ptr"), "*fp16"),
    **dict.fromkeys(("draft_top_ptr", "draft_lse_ptr", "teacher_top_ptr", "teacher_lse_ptr", "best_ptr", "partial_ptr"), WIDE),
    **dict.fromkeys(("scale_ptr", "draft_coefficient_ptr"), WIDE),
    **dict.fromkeys(("teacher_row_ptr", "target_ptr"), LONG),
}
"""Element types of pointers; all others point to bf16. Scalars are integers except FRACTIONS."""
FRACTIONS = ("eps", "offset", "scaling", "scale", "lowest", "teacher_coefficient", "gain_coefficient", "label_coefficient")


def types_of(names: list[str], constants: Mapping[str, object]) -> dict[str, str]:
    def of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name.endswith("_ptr"):
            return POINTERS.get(name, "*bf16")
        return "fp32" if name in FRACTIONS else "i32"

    return {name: of(name) for name in names}


@pytest.mark.parametrize(("kernel", "constants"), KERNELS, ids=lambda value: getattr(value, "__name__", None))
def test_kernel_compiles_for_hopper(kernel, constants) -> None:
    names = kernel.arg_names
    types = types_of(names, constants)
    source = ASTSource(kernel, types, constexprs={(names.index(name),): value for name, value in constants.items()})
    assert "cubin" in triton.compile(source, target=HOPPER).asm


@pytest.mark.parametrize("out", ["*bf16", WIDE])
@pytest.mark.parametrize("tile", invariant.TILES, ids=lambda tile: f"{tile.rows}x{tile.columns}")
def test_products_of_all_tiles_use_one_instruction_and_fit_hopper(tile: invariant.Tile, out: str) -> None:
    """With another instruction, tensor cores may round sums differently."""
    assert_one_instruction(invariant.linear_kernel, tile, {"GROUP": invariant.GROUP}, out)


@pytest.mark.parametrize("reverse", FLAGS)
@pytest.mark.parametrize("tile", [exact_experts.FEW_ROWS, exact_experts.MANY_ROWS], ids=lambda tile: f"{tile.rows}x{tile.columns}")
def test_products_of_experts_use_the_instruction_of_other_products(tile: invariant.Tile, reverse: bool) -> None:
    assert_one_instruction(exact_experts.grouped_linear_kernel, tile, {"REVERSE": reverse, "GROUPS": 128}, "*bf16")


def assert_one_instruction(kernel, tile: invariant.Tile, options: dict[str, int], out: str) -> None:
    constants = {"BM": tile.rows, "BN": tile.columns, "BK": invariant.BLOCK_K, **options}
    types = types_of(kernel.arg_names, constants) | {
        "x": f"tensordesc<bf16[{tile.rows},{invariant.BLOCK_K}]>",
        "weight": f"tensordesc<bf16[{tile.columns},{invariant.BLOCK_K}]>",
        "out_ptr": out,
    }
    names = kernel.arg_names
    source = ASTSource(kernel, types, constexprs={(names.index(name),): value for name, value in constants.items()})
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": tile.warps, "num_stages": tile.stages})
    assert set(re.findall(r"(wgmma\.mma_async|mma\.sync)[^;]*?k(\d+)\.f32\.bf16", compiled.asm["ptx"])) == {("wgmma.mma_async", "16")}
    assert compiled.metadata.shared <= 227 * 1024
