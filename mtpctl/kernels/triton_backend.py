"""The Triton backend: logits stay on the chip, and are made anew in the backward pass except for what the workspace can keep.

Matrix products whose result does not depend on a softmax (the two of the backward pass) are the library's. Memory beside the results:

- forward: four numbers a row and tile of 256 columns, for as many rows at a time as a quarter of the workspace holds, and the kept logits;
- backward: fp32 [n, H], in which the hidden gradient adds up (whatever the workspace), and a chunk of logit gradients.

Shape legend: n rows, H hidden size, V vocabulary entries of this rank, c columns at hand, T column tiles.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mtpctl.kernels import products
from mtpctl.kernels.problem import Agreement, DraftLoss, DraftPull, LocalScores, Pair, Problem, RowGrads
from mtpctl.kernels.reduce import RowStats
from mtpctl.kernels.triton_kernels import GRAD, KEEP, STATS, draft_grads, draft_sums, head_tiles, join_tiles, kept_grads

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CHUNK_COLUMNS = 16384  # wide enough for the products to run at full rate; wider ones only take memory from kept logits
MOST_PARTIAL_BYTES = 1 << 30  # the kernels count partial results in 32 bits
TILES_A_PROGRAM = 4  # of kept logits, when they become gradients
SUM_TILES, SUM_STEPS = 4, 8  # of kept logits, when two sets of them are summed over


@dataclass(frozen=True)
class Tiles:
    """How `head_tiles` is laid out on a card. `programs` 0: one a multiprocessor."""

    bm: int = 128
    bn: int = 256
    bk: int = 64
    group: int = 16
    warps: int = 8
    stages: int = 3
    programs: int = 0


@dataclass
class KeptLogits:
    """Logits of the first columns, fp16 [n, padded columns] relative to `tops` [n, T], each tile's row maxima. `grads` is the same memory
    in the operands' dtype, for what becomes of them."""

    grads: Tensor
    tops: Tensor
    columns: int

    @property
    def logits(self) -> Tensor:
        return self.grads.view(torch.float16)


def refusal(hidden: Tensor, weight: Tensor) -> str | None:
    """Why the kernels cannot take these tensors, or None."""
    if not (hidden.is_cuda or INTERPRETED):
        return f"needs CUDA (or TRITON_INTERPRET=1), hidden is on {hidden.device}"
    if hidden.dtype not in products.HALF:
        return f"needs torch.bfloat16 or torch.float16, hidden is {hidden.dtype}"
    if hidden.shape[1] % 8 or hidden.shape[1] == 0:
        return f"needs a hidden size that is a multiple of 8, hidden has {hidden.shape[1]}"
    if weight.stride(1) != 1 or weight.stride(0) % 8 or weight.data_ptr() % 16:
        return f"needs weight rows at multiples of 16 bytes, weight has strides {weight.stride()} from byte {weight.data_ptr() % 16}"
    return None


class Triton:
    name = "triton"

    def __init__(self, tiles: Tiles) -> None:
        self.tiles = tiles

    def rows_that_keep(self, problem: Problem, states: int = 1) -> int:
        width, tiles = problem.hidden.shape[1], triton.cdiv(problem.valid, self.tiles.bn)
        row = states * (problem.valid * problem.hidden.element_size() + 4 * tiles) + 16 * tiles + 4 * width
        return max(1, problem.workspace_bytes // row // self.tiles.bm * self.tiles.bm)

    def scores(self, problem: Problem, *, entropy: bool, topk: int, keep: bool) -> LocalScores:
        assert not topk, "the dispatcher sends topk elsewhere"
        h, t = problem.hidden, self.tiles
        n = len(h)
        tiles = triton.cdiv(problem.valid, t.bn)
        stats = torch.zeros(4, n, dtype=torch.float32, device=h.device)
        if tiles == 0:
            stats[0::3] = float("-inf")
            return LocalScores(RowStats(*stats.unbind(0)))
        columns = self._kept_columns(problem) if keep else 0
        scale, kept, spare = _scales(problem), None, min(problem.workspace_bytes // 4, MOST_PARTIAL_BYTES)
        if columns:
            kept = KeptLogits(_padded(h, n, columns), h.new_empty(n, triton.cdiv(columns, t.bn), dtype=torch.float32), columns)
            spare = min(spare, 4 * h.numel())  # set aside for the hidden gradient, which comes later
        rows_at_once = max(t.bm, spare // (16 * tiles) // t.bm * t.bm)
        for start in range(0, n, rows_at_once):
            rows = slice(start, min(start + rows_at_once, n))
            partial = torch.empty(4, tiles, rows.stop - rows.start, dtype=torch.float32, device=h.device)
            out = partial if kept is None else kept.logits[rows, :columns]
            self._head_tiles(problem, rows, out, 0, problem.valid, columns, scale, None, partial, entropy)
            count = rows.stop - rows.start
            with on_device_of(h):
                join_tiles[(triton.cdiv(count, 32),)](
                    partial, stats[:, rows], count, tiles, n, ENTROPY=entropy, BLOCK=32, TILES=16, num_warps=4
                )
            if kept is not None:
                kept.tops[rows] = partial[0, : kept.tops.shape[1]].T
        return LocalScores(RowStats(*stats.unbind(0)), kept=kept)

    def grads(
        self, problem: Problem, rows: RowGrads, kept: object, *, hidden: torch.dtype | None, weight: Tensor | None, add: bool
    ) -> Tensor | None:
        assert kept is None or isinstance(kept, KeptLogits)
        h, n = problem.hidden, len(problem.hidden)
        scale = _scales(problem)
        hidden_grad: Tensor | None = None
        start = 0
        if kept is not None and kept.columns:
            start = kept.columns
            self._kept_grads(problem, rows, kept, scale)
            hidden_grad = self._spend(problem, kept.grads[:, :start], slice(0, start), hidden, None, weight, add)
        step = self._chunk_columns(problem)
        buffer = _padded(h, n, min(step, problem.valid - start)) if start < problem.valid else None
        for first in range(start, problem.valid, step):
            assert buffer is not None
            columns = slice(first, min(first + step, problem.valid))
            chunk = buffer[:, : columns.stop - first]
            self._head_tiles(problem, slice(0, n), chunk, first, columns.stop, 0, scale, rows, None, rows.entropy is not None)
            hidden_grad = self._spend(problem, chunk, columns, hidden, hidden_grad, weight, add)
        if weight is not None and not add:
            weight[problem.valid :] = 0
        if hidden is not None and hidden_grad is None:  # this rank's shard is all padding
            hidden_grad = torch.zeros(h.shape, dtype=hidden, device=h.device)
        return hidden_grad

    def compare(self, problem: Problem, pair: Pair, loss: DraftLoss) -> Agreement:
        draft, teacher, rows = _kept_pair(pair)
        n, tiles = draft.tops.shape
        programs = triton.cdiv(tiles, SUM_TILES * SUM_STEPS)
        partial = torch.empty(4, programs, n, dtype=torch.float32, device=draft.tops.device)
        with on_device_of(problem.hidden):
            draft_sums[(n * programs,)](
                draft.logits,
                draft.tops,
                pair.draft_lse,
                pair.draft_top,
                teacher.logits,
                teacher.tops,
                pair.teacher_lse,
                rows,
                partial,
                n,
                draft.logits.stride(0) // 8,
                draft.columns,
                tiles,
                BN=self.tiles.bn,
                TILES=SUM_TILES,
                STEPS=SUM_STEPS,
                LOSS=loss,
                num_warps=4,
            )
        overlap, below, cost = partial[:3].sum(1).unbind(0)
        # Equally likely entries may lie in several programs' columns: the first is taken.
        first = (partial[3] > float("-inf")).to(torch.int8).argmax(0, keepdim=True)
        return Agreement(overlap, below, cost, partial[3].gather(0, first).squeeze(0), draft)

    def draft_grads(
        self, problem: Problem, pair: Pair, kept: object, pull: DraftPull, *, hidden: torch.dtype | None, weight: Tensor | None, add: bool
    ) -> Tensor | None:
        draft, teacher, rows = _kept_pair(pair)
        n, tiles = draft.tops.shape
        with on_device_of(problem.hidden):
            draft_grads[(n * triton.cdiv(tiles, TILES_A_PROGRAM),)](
                draft.logits,
                draft.tops,
                pair.draft_lse,
                teacher.logits,
                teacher.tops,
                pair.teacher_lse,
                rows,
                draft.grads,
                problem.targets,
                _scales(problem),
                pull.own,
                pull.teacher,
                pull.label,
                draft.logits.stride(0) // 8,
                tiles,
                BN=self.tiles.bn,
                TILES=TILES_A_PROGRAM,
                TOTAL_VARIATION=pull.total_variation,
                num_warps=4,
            )
        if weight is not None and not add:
            weight[problem.valid :] = 0
        return self._spend(problem, draft.grads[:, : draft.columns], slice(0, draft.columns), hidden, None, weight, add)

    def _spend(
        self,
        problem: Problem,
        chunk: Tensor,
        columns: slice,
        hidden: torch.dtype | None,
        so_far: Tensor | None,
        weight: Tensor | None,
        add: bool,
    ) -> Tensor | None:
        """The two products of a finished chunk of logit gradients."""
        if hidden is not None:
            dtype = hidden if chunk.shape[1] == problem.valid else torch.float32
            so_far = products.hidden_grad(so_far, chunk, problem.weight[columns], dtype)
        if weight is not None:
            products.weight_grad(chunk, problem.hidden, weight[columns], add)
        return so_far

    def _kept_columns(self, problem: Problem) -> int:
        """How many columns of logits fit beside what the backward pass needs anyway; all of them, or whole chunks' worth."""
        n, width = problem.hidden.shape
        size = problem.hidden.element_size()
        spare = (problem.workspace_bytes - 4 * n * width) // (n * size + triton.cdiv(4 * n, self.tiles.bn))
        if spare >= problem.valid:
            return problem.valid
        columns = spare - CHUNK_COLUMNS
        return columns // self.tiles.bn * self.tiles.bn if columns >= CHUNK_COLUMNS // 4 else 0

    def _chunk_columns(self, problem: Problem) -> int:
        n, width = problem.hidden.shape
        fit = (problem.workspace_bytes - 4 * n * width) // (problem.hidden.element_size() * n)
        bn = self.tiles.bn
        return max(4 * bn, min(fit // bn * bn, CHUNK_COLUMNS // bn * bn))

    def _head_tiles(
        self,
        problem: Problem,
        rows: slice,
        out: Tensor,
        first: int,
        end: int,
        kept: int,
        scale: Tensor,
        grads: RowGrads | None,
        partial: Tensor | None,
        entropy: bool,
    ) -> None:
        t, h, w = self.tiles, problem.hidden[rows], problem.weight
        mode = (GRAD if grads is not None else KEEP if kept else STATS).value
        a, b = TensorDescriptor.from_tensor(h, [t.bm, t.bk]), TensorDescriptor.from_tensor(w, [t.bn, t.bk])
        # STATS stores no tile; its descriptor stands for an argument that is never touched.
        store = a if mode == STATS.value else TensorDescriptor.from_tensor(out, [t.bm, t.bn])
        part = scale[rows]
        per_row = [part] * 4
        if grads is not None:
            per_row = [part if x is None else x for x in (grads.lse, grads.logprob, grads.entropy, grads.row_entropy)]
        programs = t.programs or torch.cuda.get_device_properties(h.device).multi_processor_count
        with on_device_of(h):
            head_tiles[(programs,)](
                a,
                b,
                store,
                part if partial is None else partial,
                problem.targets[rows],
                part,
                *per_row,
                len(h),
                first,
                end,
                kept,
                h.shape[1],
                BM=t.bm,
                BN=t.bn,
                BK=t.bk,
                GROUP=t.group,
                PROGRAMS=programs,
                MODE=mode,
                ENTROPY=entropy,
                num_warps=t.warps,
                num_stages=t.stages,
            )

    def _kept_grads(self, problem: Problem, rows: RowGrads, kept: KeptLogits, scale: Tensor) -> None:
        n, tiles = kept.tops.shape
        entropy = rows.entropy is not None
        with on_device_of(problem.hidden):
            kept_grads[(n * triton.cdiv(tiles, TILES_A_PROGRAM),)](
                kept.logits,
                kept.grads,
                kept.tops,
                problem.targets,
                scale,
                rows.lse,
                rows.logprob,
                rows.entropy if entropy else scale,
                rows.row_entropy if entropy else scale,
                kept.logits.stride(0) // 8,
                tiles,
                BN=self.tiles.bn,
                TILES=TILES_A_PROGRAM,
                ENTROPY=entropy,
                num_warps=4,
            )


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Kernels launch on the current device; this makes it the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _kept_pair(pair: Pair) -> tuple[KeptLogits, KeptLogits, Tensor]:
    """Kept logits of draft and teacher, and the teacher's row of each of the draft's."""
    draft, teacher = pair.draft, pair.teacher
    assert isinstance(draft, KeptLogits) and isinstance(teacher, KeptLogits)
    rows = torch.arange(len(draft.tops), device=draft.tops.device) if pair.rows is None else pair.rows
    return draft, teacher, rows


def _scales(problem: Problem) -> Tensor:
    inverse = problem.inverse_temperature
    if isinstance(inverse, Tensor):
        return inverse.contiguous()
    return torch.full((len(problem.hidden),), inverse, dtype=torch.float32, device=problem.hidden.device)


def _padded(like: Tensor, rows: int, columns: int) -> Tensor:
    """[rows, columns], uninitialised, whose rows start at multiples of 16 bytes."""
    return like.new_empty(rows, triton.cdiv(columns, 8) * 8)[:, :columns]


def tiles_for(device: int | None) -> Tiles:
    """The layout for a card: measured on Hopper; elsewhere one that fits 100 KiB of shared memory. None: Triton's interpreter."""
    if device is None:
        return Tiles(bm=16, bn=64, bk=32, group=2, warps=1, stages=1, programs=3)
    if torch.cuda.get_device_capability(device)[0] == 9:
        return Tiles()
    return Tiles(bm=128, bn=128, bk=32, warps=8, stages=3)
