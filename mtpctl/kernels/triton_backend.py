"""Triton backend: fuses the LM head's matrix product with the softmax statistics, which are computed in registers.

Logits that fit the workspace are saved; the backward pass recomputes the others. Its two matrix products, which need no softmax, are not
fused (`mtpctl.kernels.products`). Memory in addition to the results:

- forward: the saved logits, and partial results of four numbers per row and tile of 256 columns. Rows are processed in parts, so that
  the partial results take at most a quarter of the workspace;
- backward: the accumulated hidden gradient, fp32 [n, H] (regardless of the workspace), and a chunk of logit gradients.

`head_tiles_kernel` processes tiles of [BM rows, BN vocabulary entries], with one persistent program per SM and fp32 logits in registers.
`MODE` selects the result of a tile:

- STATS: maximum, mass, moment and target logit of each row over the tile's columns, as partial results for `join_tiles_kernel`;
- KEEP: the same, and the tile's logits relative to the row's maximum in the tile, rounded to fp16. fp16 is most exact near 0, so
  the most likely entries are rounded least. Without the subtraction they would be rounded most;
- GRAD: the gradient of the unscaled logits, given each row's log-sum-exp and upstream gradients, rounded to the operands' dtype.

Tiles are processed in groups of rows, so that concurrent programs share slices of hidden and weight in the L2 cache.

Shape legend: n rows, H hidden size, V vocabulary entries of this rank, c columns of a chunk, T column tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import torch
from torch import Tensor

from mtpctl.kernels import products
from mtpctl.kernels.backend import (
    Agreement,
    DraftGradCoefficients,
    DraftLoss,
    GradOutputs,
    LocalScores,
    LogitPair,
    Problem,
    RowGrads,
    RowStats,
)
from mtpctl.kernels.triton_support import INTERPRETED, TensorDescriptor, on_device_of, tl, triton

CHUNK_COLUMNS = 16384  # enough for products at full rate; more would only take memory from saved logits
MAX_PARTIAL_BYTES = 1 << 30  # the kernels index partial results in 32 bits
TILES_PER_PROGRAM = 4  # of `saved_grads_kernel` and `draft_grads_kernel`
SUM_TILES, SUM_STEPS = 4, 8  # tiles per step and steps per program of `draft_sums_kernel`

STATS = tl.constexpr(0)
KEEP = tl.constexpr(1)
GRAD = tl.constexpr(2)
LOG2E = tl.constexpr(1.4426950408889634)
# Logit of columns out of range. Finite, so that 0 x FLOOR = 0 in the moment; minus infinity would give NaN.
FLOOR = tl.constexpr(-1e30)
# Smallest saved logit relative to its row's maximum: far below the smallest nonzero exp, and within fp16's range.
MIN_KEPT = tl.constexpr(-6e4)


@dataclass(frozen=True)
class Tiles:
    """Launch configuration of `head_tiles_kernel`. programs: 0 launches one per SM."""

    bm: int = 128
    bn: int = 256
    bk: int = 64
    group: int = 16
    warps: int = 8
    stages: int = 3
    programs: int = 0


def tiles_for(device: int | None) -> Tiles:
    """Tiles for a GPU: measured on Hopper, elsewhere small enough for 100 KiB of shared memory. None: Triton's interpreter."""
    if device is None:
        return Tiles(bm=16, bn=64, bk=32, group=2, warps=1, stages=1, programs=3)
    if torch.cuda.get_device_capability(device)[0] == 9:
        return Tiles()
    return Tiles(bm=128, bn=128, bk=32, warps=8, stages=3)


def unsupported_reason(hidden: Tensor, weight: Tensor) -> str | None:
    """The reason why the kernels do not support these tensors; None if they do."""
    if not (hidden.is_cuda or INTERPRETED):
        return f"needs CUDA (or TRITON_INTERPRET=1), hidden is on {hidden.device}"
    if hidden.dtype not in products.HALF_DTYPES:
        return f"needs torch.bfloat16 or torch.float16, hidden is {hidden.dtype}"
    if hidden.shape[1] % 8 or hidden.shape[1] == 0:
        return f"needs a hidden size that is a multiple of 8, hidden has {hidden.shape[1]}"
    if weight.stride(1) != 1 or weight.stride(0) % 8 or weight.data_ptr() % 16:
        return f"needs weight rows at multiples of 16 bytes, weight has strides {weight.stride()} from byte {weight.data_ptr() % 16}"
    return None


@dataclass
class SavedLogits:
    """Logits of the first `columns` columns: fp16 [n, padded columns], relative to each tile's row maxima `tile_max` [n, T].

    grads: the same memory in the operands' dtype, for the gradients that overwrite the logits.
    """

    grads: Tensor
    tile_max: Tensor
    columns: int

    @property
    def logits(self) -> Tensor:
        return self.grads.view(torch.float16)


class Triton:
    name = "triton"

    def __init__(self, tiles: Tiles) -> None:
        self.tiles = tiles

    def rows_per_slice(self, problem: Problem, states_per_row: int = 1) -> int:
        width, column_tiles = problem.hidden.shape[1], triton.cdiv(problem.vocab_columns, self.tiles.bn)
        saved_bytes = states_per_row * (problem.vocab_columns * problem.hidden.element_size() + 4 * column_tiles)
        bytes_per_row = saved_bytes + 16 * column_tiles + 4 * width
        return max(1, problem.workspace_bytes // bytes_per_row // self.tiles.bm * self.tiles.bm)

    def scores(self, problem: Problem, *, entropy: bool, topk: int, for_backward: bool) -> LocalScores:
        assert not topk, "the dispatcher selects another backend for topk"
        h, t = problem.hidden, self.tiles
        n = len(h)
        column_tiles = triton.cdiv(problem.vocab_columns, t.bn)
        stats = torch.zeros(4, n, dtype=torch.float32, device=h.device)
        if column_tiles == 0:
            stats[0::3] = float("-inf")
            return LocalScores(RowStats(*stats.unbind(0)))
        columns = self._saved_columns(problem) if for_backward else 0
        scale, saved, partial_bytes = _row_scales(problem), None, min(problem.workspace_bytes // 4, MAX_PARTIAL_BYTES)
        if columns:
            saved = SavedLogits(_aligned_empty(h, n, columns), h.new_empty(n, triton.cdiv(columns, t.bn), dtype=torch.float32), columns)
            # Saved logits fill the workspace, except for the hidden gradient's part, which is free until the backward pass.
            partial_bytes = min(partial_bytes, 4 * h.numel())
        rows_at_once = max(t.bm, partial_bytes // (16 * column_tiles) // t.bm * t.bm)
        for start in range(0, n, rows_at_once):
            rows = slice(start, min(start + rows_at_once, n))
            count = rows.stop - rows.start
            partial = torch.empty(4, column_tiles, count, dtype=torch.float32, device=h.device)
            out = partial if saved is None else saved.logits[rows, :columns]
            self._head_tiles(problem, rows, out, 0, problem.vocab_columns, columns, scale, None, partial, entropy)
            with on_device_of(h):
                join_tiles_kernel[(triton.cdiv(count, 32),)](
                    partial, stats[:, rows], count, column_tiles, n, ENTROPY=entropy, BLOCK=32, TILES=16, num_warps=4
                )
            if saved is not None:
                saved.tile_max[rows] = partial[0, : saved.tile_max.shape[1]].T
        return LocalScores(RowStats(*stats.unbind(0)), saved=saved)

    def grads(self, problem: Problem, row_grads: RowGrads, saved: object, outputs: GradOutputs) -> Tensor | None:
        assert saved is None or isinstance(saved, SavedLogits)
        h, n = problem.hidden, len(problem.hidden)
        scale = _row_scales(problem)
        hidden_grad: Tensor | None = None
        start = 0
        if saved is not None and saved.columns:
            start = saved.columns
            self._saved_grads(problem, row_grads, saved, scale)
            hidden_grad = _apply_logit_grads(problem, saved.grads[:, :start], slice(0, start), None, outputs)
        step = self._chunk_columns(problem)
        buffer = _aligned_empty(h, n, min(step, problem.vocab_columns - start)) if start < problem.vocab_columns else None
        for first in range(start, problem.vocab_columns, step):
            assert buffer is not None
            columns = slice(first, min(first + step, problem.vocab_columns))
            chunk = buffer[:, : columns.stop - first]
            self._head_tiles(problem, slice(0, n), chunk, first, columns.stop, 0, scale, row_grads, None, row_grads.entropy is not None)
            hidden_grad = _apply_logit_grads(problem, chunk, columns, hidden_grad, outputs)
        outputs.clear_padding(problem.vocab_columns)
        if outputs.hidden_dtype is not None and hidden_grad is None:  # this rank's shard is all padding
            hidden_grad = torch.zeros(h.shape, dtype=outputs.hidden_dtype, device=h.device)
        return hidden_grad

    def compare(self, problem: Problem, pair: LogitPair, loss: DraftLoss) -> Agreement:
        draft, teacher, rows = _saved_pair(pair)
        n, column_tiles = draft.tile_max.shape
        programs = triton.cdiv(column_tiles, SUM_TILES * SUM_STEPS)
        partial = torch.empty(4, programs, n, dtype=torch.float32, device=draft.tile_max.device)
        with on_device_of(problem.hidden):
            draft_sums_kernel[(n * programs,)](
                draft.logits, draft.tile_max, pair.draft_lse, pair.draft_top, teacher.logits, teacher.tile_max, pair.teacher_lse, rows,
                partial, n, draft.logits.stride(0) // 8, draft.columns, column_tiles,
                BN=self.tiles.bn, TILES=SUM_TILES, STEPS=SUM_STEPS, LOSS=loss, num_warps=4,
            )  # fmt: skip
        overlap, expected_gain, cost = partial[:3].sum(1).unbind(0)
        # Equally likely entries may be in several programs' columns: take the first.
        first = (partial[3] > float("-inf")).to(torch.int8).argmax(0, keepdim=True)
        return Agreement(overlap, expected_gain, cost, partial[3].gather(0, first).squeeze(0), draft)

    def draft_grads(
        self, problem: Problem, pair: LogitPair, saved: object, coefficients: DraftGradCoefficients, outputs: GradOutputs
    ) -> Tensor | None:
        draft, teacher, rows = _saved_pair(pair)
        n, column_tiles = draft.tile_max.shape
        with on_device_of(problem.hidden):
            draft_grads_kernel[(n * triton.cdiv(column_tiles, TILES_PER_PROGRAM),)](
                draft.logits, draft.tile_max, pair.draft_lse, teacher.logits, teacher.tile_max, pair.teacher_lse, rows, draft.grads,
                problem.targets, _row_scales(problem), coefficients.draft, coefficients.teacher, coefficients.gain, coefficients.label,
                draft.logits.stride(0) // 8, column_tiles,
                BN=self.tiles.bn, TILES=TILES_PER_PROGRAM, HAS_TEACHER=coefficients.teacher != 0, HAS_GAIN=coefficients.gain != 0,
                GREEDY=coefficients.greedy, num_warps=4,
            )  # fmt: skip
        outputs.clear_padding(problem.vocab_columns)
        return _apply_logit_grads(problem, draft.grads[:, : draft.columns], slice(0, draft.columns), None, outputs)

    def _saved_columns(self, problem: Problem) -> int:
        """Columns whose logits fit the workspace alongside the backward pass's buffers: all, or whole tiles (0 if few would fit)."""
        n, width = problem.hidden.shape
        size = problem.hidden.element_size()
        columns_that_fit = (problem.workspace_bytes - 4 * n * width) // (n * size + triton.cdiv(4 * n, self.tiles.bn))
        if columns_that_fit >= problem.vocab_columns:
            return problem.vocab_columns
        columns = columns_that_fit - CHUNK_COLUMNS
        return columns // self.tiles.bn * self.tiles.bn if columns >= CHUNK_COLUMNS // 4 else 0

    def _chunk_columns(self, problem: Problem) -> int:
        n, width = problem.hidden.shape
        max_columns = (problem.workspace_bytes - 4 * n * width) // (problem.hidden.element_size() * n)
        bn = self.tiles.bn
        return max(4 * bn, min(max_columns // bn * bn, CHUNK_COLUMNS // bn * bn))

    def _head_tiles(
        self,
        problem: Problem,
        rows: slice,
        out: Tensor,
        first: int,
        end: int,
        saved_columns: int,
        scale: Tensor,
        grads: RowGrads | None,
        partial: Tensor | None,
        entropy: bool,
    ) -> None:
        t, h, w = self.tiles, problem.hidden[rows], problem.weight
        mode = (GRAD if grads is not None else KEEP if saved_columns else STATS).value
        a, b = TensorDescriptor.from_tensor(h, [t.bm, t.bk]), TensorDescriptor.from_tensor(w, [t.bn, t.bk])
        # STATS stores no tile; `a` is a placeholder for the unused descriptor.
        out_tile = a if mode == STATS.value else TensorDescriptor.from_tensor(out, [t.bm, t.bn])
        row_scales = scale[rows]
        per_row = [row_scales] * 4
        if grads is not None:
            per_row = [row_scales if x is None else x for x in (grads.lse, grads.logprob, grads.entropy, grads.row_entropy)]
        programs = t.programs or torch.cuda.get_device_properties(h.device).multi_processor_count
        with on_device_of(h):
            head_tiles_kernel[(programs,)](
                a, b, out_tile, row_scales if partial is None else partial, problem.targets[rows], row_scales, *per_row,
                len(h), first, end, saved_columns, h.shape[1],
                BM=t.bm, BN=t.bn, BK=t.bk, GROUP=t.group, PROGRAMS=programs, MODE=mode, ENTROPY=entropy,
                num_warps=t.warps, num_stages=t.stages,
            )  # fmt: skip

    def _saved_grads(self, problem: Problem, row_grads: RowGrads, saved: SavedLogits, scale: Tensor) -> None:
        """Overwrite saved logits with the gradients of the unscaled logits."""
        n, column_tiles = saved.tile_max.shape
        entropy = row_grads.entropy is not None
        with on_device_of(problem.hidden):
            saved_grads_kernel[(n * triton.cdiv(column_tiles, TILES_PER_PROGRAM),)](
                saved.logits, saved.grads, saved.tile_max, problem.targets, scale, row_grads.lse, row_grads.logprob,
                row_grads.entropy if entropy else scale, row_grads.row_entropy if entropy else scale,
                saved.logits.stride(0) // 8, column_tiles,
                BN=self.tiles.bn, TILES=TILES_PER_PROGRAM, ENTROPY=entropy, num_warps=4,
            )  # fmt: skip


def _apply_logit_grads(problem: Problem, chunk: Tensor, columns: slice, hidden_grad: Tensor | None, outputs: GradOutputs) -> Tensor | None:
    """From a chunk of logit gradients, return `hidden_grad` plus the chunk's part, and write the chunk's rows of the weight gradient."""
    if outputs.hidden_dtype is not None:
        dtype = outputs.hidden_dtype if chunk.shape[1] == problem.vocab_columns else torch.float32
        hidden_grad = products.hidden_grad(hidden_grad, chunk, problem.weight[columns], dtype)
    if outputs.weight is not None:
        products.weight_grad(chunk, problem.hidden, outputs.weight[columns], outputs.add)
    return hidden_grad


def _saved_pair(pair: LogitPair) -> tuple[SavedLogits, SavedLogits, Tensor]:
    """Saved logits of draft and teacher, and the teacher row of each draft row."""
    draft, teacher = pair.draft, pair.teacher
    assert isinstance(draft, SavedLogits) and isinstance(teacher, SavedLogits)
    rows = torch.arange(len(draft.tile_max), device=draft.tile_max.device) if pair.rows is None else pair.rows
    return draft, teacher, rows


def _row_scales(problem: Problem) -> Tensor:
    inverse = problem.inverse_temperature
    if isinstance(inverse, Tensor):
        return inverse.contiguous()
    return torch.full((len(problem.hidden),), inverse, dtype=torch.float32, device=problem.hidden.device)


def _aligned_empty(like: Tensor, rows: int, columns: int) -> Tensor:
    """Uninitialized [rows, columns] whose rows start at multiples of 16 bytes."""
    return like.new_empty(rows, triton.cdiv(columns, 8) * 8)[:, :columns]


# Sizes change with every packed batch. Specializing on them would recompile the kernel whenever one stops being a multiple of 16.
@triton.jit(do_not_specialize=["n", "first_column", "end_column", "saved_columns"])
@no_type_check
def head_tiles_kernel(
    hidden,  # descriptor [n, H], block [BM, BK]
    weight,  # descriptor [V, H], block [BN, BK]
    out,  # descriptor [n, saved or c], block [BM, BN]: KEEP, GRAD
    partial_ptr,  # fp32 [4, T, n]: STATS, KEEP
    target_ptr,  # int64 [n], relative to the weight's first row
    scale_ptr,  # fp32 [n], inverse temperature
    lse_ptr,  # fp32 [n]: GRAD
    by_logprob_ptr,  # fp32 [n]: GRAD
    by_entropy_ptr,  # fp32 [n]: GRAD with ENTROPY
    row_entropy_ptr,  # fp32 [n]: GRAD with ENTROPY
    n,
    first_column,  # a multiple of BN
    end_column,
    saved_columns,  # KEEP: number of columns stored
    width,  # H
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    MODE: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    row_tiles = tl.cdiv(n, BM)
    column_tiles = tl.cdiv(end_column - first_column, BN)
    group_tiles = GROUP * column_tiles
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=True):
        group = tile // group_tiles
        members = min(row_tiles - group * GROUP, GROUP)
        row0 = (group * GROUP + (tile % group_tiles) % members) * BM
        column_tile = (tile % group_tiles) // members
        column0 = first_column + column_tile * BN
        z = tl.zeros((BM, BN), dtype=tl.float32)
        for step in range(tl.cdiv(width, BK)):
            a = hidden.load([row0, step * BK])
            b = weight.load([column0, step * BK])
            z = tl.dot(a, b.T, z)

        row = row0 + tl.arange(0, BM)
        inside = row < n
        column = column0 + tl.arange(0, BN)
        scale = tl.load(scale_ptr + row, mask=inside, other=1.0)
        target = tl.load(target_ptr + row, mask=inside, other=-1).to(tl.int32)
        z = z * scale[:, None]
        if MODE == GRAD:
            logp = z - tl.load(lse_ptr + row, mask=inside, other=0.0)[:, None]
            by_logprob = tl.load(by_logprob_ptr + row, mask=inside, other=0.0) * scale
            coefficient = by_logprob[:, None]
            if ENTROPY:
                by_entropy = tl.load(by_entropy_ptr + row, mask=inside, other=0.0) * scale
                row_entropy = tl.load(row_entropy_ptr + row, mask=inside, other=0.0)
                coefficient = coefficient + by_entropy[:, None] * (logp + row_entropy[:, None])
            grad = tl.where(column[None, :] == target[:, None], by_logprob[:, None], 0.0) - tl.exp2(logp * LOG2E) * coefficient
            out.store([row0, column0 - first_column], grad.to(out.dtype))
        else:
            z = tl.where(column[None, :] < end_column, z, FLOOR)
            top = tl.max(z, 1)
            stride = column_tiles * n
            pointers = partial_ptr + column_tile * n + row
            tl.store(pointers, top, mask=inside)
            picked = tl.full((BM,), float("-inf"), dtype=tl.float32)
            if tl.sum(((target >= column0) & (target < column0 + BN)).to(tl.int32)) > 0:
                picked = tl.max(tl.where(column[None, :] == target[:, None], z, float("-inf")), 1)
            tl.store(pointers + 3 * stride, picked, mask=inside)
            shifted = z - top[:, None]
            if MODE == KEEP:  # noqa: SIM102 - this one is decided at compile time
                if column0 - first_column < saved_columns:
                    out.store([row0, column0 - first_column], tl.maximum(shifted, MIN_KEPT).to(out.dtype))
            e = tl.exp2(shifted * LOG2E)
            tl.store(pointers + stride, tl.sum(e, 1), mask=inside)
            if ENTROPY:
                tl.store(pointers + 2 * stride, tl.sum(e * shifted, 1), mask=inside)


@triton.jit(do_not_specialize=["n", "tiles", "stride"])
@no_type_check
def join_tiles_kernel(
    partial_ptr,  # fp32 [4, T, n]
    stats_ptr,  # fp32 [4, n], row stride `stride`: top, mass, moment, target
    n,
    tiles,
    stride,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n
    top = tl.full((BLOCK,), FLOOR, dtype=tl.float32)
    target = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((BLOCK,), dtype=tl.float32)
    moment = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        here = (tile[:, None] < tiles) & inside[None, :]
        pointers = partial_ptr + tile[:, None] * n + row[None, :]
        tops = tl.load(pointers, mask=here, other=FLOOR)
        new_top = tl.maximum(top, tl.max(tops, 0))
        shift = top - new_top
        decay = tl.exp2(shift * LOG2E)
        shifts = tops - new_top[None, :]
        decays = tl.exp2(shifts * LOG2E)
        masses = tl.load(pointers + tiles * n, mask=here, other=0.0)
        if ENTROPY:
            moments = tl.load(pointers + 2 * tiles * n, mask=here, other=0.0)
            moment = (moment + mass * shift) * decay + tl.sum((moments + masses * shifts) * decays, 0)
        mass = mass * decay + tl.sum(masses * decays, 0)
        target = tl.maximum(target, tl.max(tl.load(pointers + 3 * tiles * n, mask=here, other=float("-inf")), 0))
        top = new_top
    tl.store(stats_ptr + row, top, mask=inside)
    tl.store(stats_ptr + stride + row, mass, mask=inside)
    tl.store(stats_ptr + 2 * stride + row, moment, mask=inside)
    tl.store(stats_ptr + 3 * stride + row, target, mask=inside)


@triton.jit(do_not_specialize=["eights", "tiles"])
@no_type_check
def saved_grads_kernel(
    saved_ptr,  # fp16 [n, c], padded in memory to 8 x `eights` columns: stored by KEEP
    grad_ptr,  # the same memory, in the operands' dtype: overwritten with the gradient of the unscaled logits
    top_ptr,  # fp32 [n, T]: each tile's maxima; saved logits are relative to them
    target_ptr,  # int64 [n], relative to the first column
    scale_ptr,  # fp32 [n], inverse temperature
    lse_ptr,  # fp32 [n]
    by_logprob_ptr,  # fp32 [n]
    by_entropy_ptr,  # fp32 [n]: ENTROPY
    row_entropy_ptr,  # fp32 [n]: ENTROPY
    eights,
    tiles,  # T
    BN: tl.constexpr,
    TILES: tl.constexpr,  # per program
    ENTROPY: tl.constexpr,
):
    # Concurrent programs process the same row. On different rows, each would access a different memory page.
    programs = tl.cdiv(tiles, TILES)
    row = (tl.program_id(0) // programs).to(tl.int64)
    tile = (tl.program_id(0) % programs) * TILES + tl.arange(0, TILES)
    top = tl.load(top_ptr + row * tiles + tile, mask=tile < tiles, other=0.0)
    column = tile[:, None] * BN + tl.arange(0, BN)[None, :]
    # Padding is processed as well: multiples of 8 let the compiler load and store 16 bytes at a time.
    inside = column < eights * 8
    index = row * (eights * 8) + column
    saved = tl.load(saved_ptr + index, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + row)
    by_logprob = tl.load(by_logprob_ptr + row) * scale
    logp = saved + (top - tl.load(lse_ptr + row))[:, None]
    coefficient = by_logprob
    if ENTROPY:
        coefficient += tl.load(by_entropy_ptr + row) * scale * (logp + tl.load(row_entropy_ptr + row))
    grad = tl.where(column == tl.load(target_ptr + row), by_logprob, 0.0) - tl.exp2(logp * LOG2E) * coefficient
    tl.store(grad_ptr + index, grad.to(grad_ptr.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def saved_logp(
    saved_ptr,  # fp16, stored by KEEP
    top_ptr,
    row,
    lse,
    tile,
    tiles,
    index,
    inside,
):
    """Log-probs of some tiles of a row, their saved logits, and the tile maxima that the saved logits are relative to."""
    top = tl.load(top_ptr + row * tiles + tile, mask=tile < tiles, other=0.0)
    saved = tl.load(saved_ptr + index, mask=inside, other=0.0).to(tl.float32)
    return saved + (top - lse)[:, None], saved, top


@triton.jit(do_not_specialize=["n", "eights", "columns", "tiles"])
@no_type_check
def draft_sums_kernel(
    draft_ptr,  # fp16 [n, c], padded in memory to 8 x `eights` columns: stored by KEEP
    draft_top_ptr,  # fp32 [n, T]
    draft_lse_ptr,
    best_ptr,  # fp32 [n]: the draft's largest logit
    teacher_ptr,  # [·, c] like the draft's
    teacher_top_ptr,
    teacher_lse_ptr,  # fp32 [n]
    teacher_row_ptr,  # int64 [n]
    partial_ptr,  # fp32 [4, P, n]: overlap, expected_gain, cost, the teacher's log-prob of the draft's most likely entry
    n,
    eights,
    columns,
    tiles,
    BN: tl.constexpr,
    TILES: tl.constexpr,  # per step of a program
    STEPS: tl.constexpr,  # per program
    LOSS: tl.constexpr,
):
    programs = tl.cdiv(tiles, TILES * STEPS)
    row = (tl.program_id(0) // programs).to(tl.int64)
    part = tl.program_id(0) % programs
    teacher_row = tl.load(teacher_row_ptr + row)
    draft_lse = tl.load(draft_lse_ptr + row)
    teacher_lse = tl.load(teacher_lse_ptr + row)
    best = tl.load(best_ptr + row)
    overlap = tl.zeros((TILES, BN), dtype=tl.float32)
    expected_gain = tl.zeros((TILES, BN), dtype=tl.float32)
    cost = tl.zeros((TILES, BN), dtype=tl.float32)
    first_choice = float("-inf")
    program_tiles = part * (TILES * STEPS) + tl.arange(0, TILES * STEPS)
    holds_best = tl.max(tl.load(draft_top_ptr + row * tiles + program_tiles, mask=program_tiles < tiles, other=FLOOR), 0) >= best
    for step in range(STEPS):
        tile = (part * STEPS + step) * TILES + tl.arange(0, TILES)
        column = tile[:, None] * BN + tl.arange(0, BN)[None, :]
        inside = column < eights * 8
        logq, saved, top = saved_logp(draft_ptr, draft_top_ptr, row, draft_lse, tile, tiles, row * (eights * 8) + column, inside)
        logp, _, _ = saved_logp(
            teacher_ptr, teacher_top_ptr, teacher_row, teacher_lse, tile, tiles, teacher_row * (eights * 8) + column, inside
        )
        logq = tl.where(column < columns, logq, FLOOR)
        logp = tl.where(column < columns, logp, FLOOR)
        q = tl.exp2(logq * LOG2E)
        p = tl.exp2(logp * LOG2E)
        overlap += tl.minimum(p, q)
        if LOSS == "tv" or LOSS == "e2e_tv":
            expected_gain += tl.where(logq < logp, q, 0.0)
        elif LOSS == "e2e_greedy":
            expected_gain += q * p
        if LOSS == "kl":
            cost += p * (logp - logq)
        elif LOSS == "soft_ce" or LOSS == "e2e_tv" or LOSS == "e2e_greedy":
            cost -= p * logq
        if holds_best:
            first = (saved == 0) & (top[:, None] == best) & (column < columns)
            index = tl.min(tl.min(tl.where(first, column, 2147483647), 1), 0)
            choice = tl.max(tl.max(tl.where(column == index, logp, float("-inf")), 1), 0)
            first_choice = tl.where(first_choice == float("-inf"), choice, first_choice)
    partial = partial_ptr + part * n + row
    stride = programs * n
    tl.store(partial, tl.sum(tl.sum(overlap, 1), 0))
    tl.store(partial + stride, tl.sum(tl.sum(expected_gain, 1), 0))
    tl.store(partial + 2 * stride, tl.sum(tl.sum(cost, 1), 0))
    tl.store(partial + 3 * stride, first_choice)


@triton.jit(do_not_specialize=["eights", "tiles"])
@no_type_check
def draft_grads_kernel(
    draft_ptr,  # as in `draft_sums_kernel`
    draft_top_ptr,
    draft_lse_ptr,
    teacher_ptr,
    teacher_top_ptr,
    teacher_lse_ptr,
    teacher_row_ptr,
    grad_ptr,  # the draft's memory, in the operands' dtype: overwritten with the gradient of the unscaled logits
    target_ptr,  # int64 [n], relative to the first column
    scale_ptr,  # fp32 [n], inverse temperature
    draft_coefficient_ptr,  # fp32 [n]
    teacher_coefficient,
    gain_coefficient,
    label_coefficient,
    eights,
    tiles,
    BN: tl.constexpr,
    TILES: tl.constexpr,  # per program
    HAS_TEACHER: tl.constexpr,  # whether `teacher_coefficient` is not 0
    HAS_GAIN: tl.constexpr,  # whether `gain_coefficient` is not 0
    GREEDY: tl.constexpr,
):
    programs = tl.cdiv(tiles, TILES)
    row = (tl.program_id(0) // programs).to(tl.int64)
    tile = (tl.program_id(0) % programs) * TILES + tl.arange(0, TILES)
    teacher_row = tl.load(teacher_row_ptr + row)
    column = tile[:, None] * BN + tl.arange(0, BN)[None, :]
    inside = column < eights * 8
    index = row * (eights * 8) + column
    logq, _, _ = saved_logp(draft_ptr, draft_top_ptr, row, tl.load(draft_lse_ptr + row), tile, tiles, index, inside)
    logp, _, _ = saved_logp(
        teacher_ptr, teacher_top_ptr, teacher_row, tl.load(teacher_lse_ptr + row), tile, tiles, teacher_row * (eights * 8) + column, inside
    )
    q = tl.exp2(logq * LOG2E)
    grad = q * tl.load(draft_coefficient_ptr + row) - tl.where(column == tl.load(target_ptr + row), label_coefficient, 0.0)
    if HAS_TEACHER:
        grad -= tl.exp2(logp * LOG2E) * teacher_coefficient
    if GREEDY:
        grad -= q * tl.exp2(logp * LOG2E) * gain_coefficient
    elif HAS_GAIN:
        grad -= tl.where(logq < logp, q, 0.0) * gain_coefficient
    tl.store(grad_ptr + index, (grad * tl.load(scale_ptr + row)).to(grad_ptr.dtype.element_ty), mask=inside)
