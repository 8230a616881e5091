# mypy: disallow-untyped-defs=False
# (what is inside a Triton kernel has no Python types)
"""The Triton kernels: the head's matrix product with its softmax done where the tile of logits lies, and its companions.

`head_tiles` walks tiles of [BM rows, BN vocabulary entries], one persistent program a multiprocessor, logits in fp32 registers. What
becomes of a finished tile is `MODE`:

- STATS: maximum, mass, moment and target logit of each row over the tile's columns, written as partial results, joined by `join_tiles`;
- KEEP: the same, and the tile's logits relative to the row's maximum in the tile, rounded to fp16. Relative to the maximum, the likeliest
  entries lose least to the rounding, where plain logits would lose most;
- GRAD: the gradient of the unscaled logits, given each row's log-sum-exp and upstream gradients, rounded to the operands' dtype.

Tiles are walked in groups of rows, so that what runs at one time shares its slices of hidden and weight in the L2 cache.

Shape legend: n rows, H hidden size, V vocabulary entries of this rank, c columns at hand, T column tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

STATS = tl.constexpr(0)
KEEP = tl.constexpr(1)
GRAD = tl.constexpr(2)
LOG2E = tl.constexpr(1.4426950408889634)
# Stands for "no logit". Finite, so that 0 x FLOOR = 0 in the moment, where minus infinity would make it undefined.
FLOOR = tl.constexpr(-1e30)
# The least that is kept of a logit relative to its row's maximum: far below what exp can tell from 0, and within fp16's range.
LEAST_KEPT = tl.constexpr(-6e4)


# Sizes change with every packed batch: specialising on them would compile anew each time one stops being a multiple of 16.
@triton.jit(do_not_specialize=["n", "first_column", "end_column", "kept_columns"])
def head_tiles(
    hidden,  # descriptor [n, H], block [BM, BK]
    weight,  # descriptor [V, H], block [BN, BK]
    out,  # descriptor [n, kept or c], block [BM, BN]: KEEP, GRAD
    partial_ptr,  # fp32 [4, T, n]: STATS, KEEP
    target_ptr,  # int64 [n], counted from the weight's first row
    scale_ptr,  # fp32 [n], inverse temperature
    lse_ptr,
    by_logprob_ptr,
    by_entropy_ptr,
    row_entropy_ptr,  # fp32 [n]: GRAD; the last two with ENTROPY alone
    n,
    first_column,  # a multiple of BN
    end_column,
    kept_columns,  # KEEP: how many of the columns are stored
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
            pull = by_logprob[:, None]
            if ENTROPY:
                by_entropy = tl.load(by_entropy_ptr + row, mask=inside, other=0.0) * scale
                row_entropy = tl.load(row_entropy_ptr + row, mask=inside, other=0.0)
                pull = pull + by_entropy[:, None] * (logp + row_entropy[:, None])
            grad = tl.where(column[None, :] == target[:, None], by_logprob[:, None], 0.0) - tl.exp2(logp * LOG2E) * pull
            out.store([row0, column0 - first_column], grad.to(out.dtype))
        else:
            z = tl.where(column[None, :] < end_column, z, FLOOR)
            top = tl.max(z, 1)
            stride = column_tiles * n
            place = partial_ptr + column_tile * n + row
            tl.store(place, top, mask=inside)
            picked = tl.full((BM,), float("-inf"), dtype=tl.float32)
            if tl.sum(((target >= column0) & (target < column0 + BN)).to(tl.int32)) > 0:
                picked = tl.max(tl.where(column[None, :] == target[:, None], z, float("-inf")), 1)
            tl.store(place + 3 * stride, picked, mask=inside)
            shifted = z - top[:, None]
            if MODE == KEEP:  # noqa: SIM102 - decided when compiling, the other while running
                if column0 - first_column < kept_columns:
                    out.store([row0, column0 - first_column], tl.maximum(shifted, LEAST_KEPT).to(out.dtype))
            e = tl.exp2(shifted * LOG2E)
            tl.store(place + stride, tl.sum(e, 1), mask=inside)
            if ENTROPY:
                tl.store(place + 2 * stride, tl.sum(e * shifted, 1), mask=inside)


@triton.jit(do_not_specialize=["n", "tiles", "stride"])
def join_tiles(
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
        place = partial_ptr + tile[:, None] * n + row[None, :]
        tops = tl.load(place, mask=here, other=FLOOR)
        newer = tl.maximum(top, tl.max(tops, 0))
        shift = top - newer
        keep = tl.exp2(shift * LOG2E)
        shifts = tops - newer[None, :]
        keeps = tl.exp2(shifts * LOG2E)
        masses = tl.load(place + tiles * n, mask=here, other=0.0)
        if ENTROPY:
            moments = tl.load(place + 2 * tiles * n, mask=here, other=0.0)
            moment = (moment + mass * shift) * keep + tl.sum((moments + masses * shifts) * keeps, 0)
        mass = mass * keep + tl.sum(masses * keeps, 0)
        target = tl.maximum(target, tl.max(tl.load(place + 3 * tiles * n, mask=here, other=float("-inf")), 0))
        top = newer
    tl.store(stats_ptr + row, top, mask=inside)
    tl.store(stats_ptr + stride + row, mass, mask=inside)
    tl.store(stats_ptr + 2 * stride + row, moment, mask=inside)
    tl.store(stats_ptr + 3 * stride + row, target, mask=inside)


@triton.jit(do_not_specialize=["eights", "tiles"])
def kept_grads(
    kept_ptr,  # fp16 [n, c], padded in memory to 8 x `eights` columns: what KEEP stored
    grad_ptr,  # the same memory, in the operands' dtype: overwritten with the gradient of the unscaled logits
    top_ptr,  # fp32 [n, T]: each tile's maxima, to which the kept logits are relative
    target_ptr,  # int64 [n], counted from the first column
    scale_ptr,
    lse_ptr,
    by_logprob_ptr,
    by_entropy_ptr,
    row_entropy_ptr,  # fp32 [n]; the last two with ENTROPY alone
    eights,
    tiles,  # T
    BN: tl.constexpr,
    TILES: tl.constexpr,  # how many one program does
    ENTROPY: tl.constexpr,
):
    # Programs that run together lie along a row: across rows, every one would open a page of memory of its own.
    programs = tl.cdiv(tiles, TILES)
    row = (tl.program_id(0) // programs).to(tl.int64)
    tile = (tl.program_id(0) % programs) * TILES + tl.arange(0, TILES)
    top = tl.load(top_ptr + row * tiles + tile, mask=tile < tiles, other=0.0)
    column = tile[:, None] * BN + tl.arange(0, BN)[None, :]
    # Padding is worked on too: a length of whole eights lets the compiler read and write 16 bytes at a time.
    inside = column < eights * 8
    place = row * (eights * 8) + column
    kept = tl.load(kept_ptr + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + row)
    by_logprob = tl.load(by_logprob_ptr + row) * scale
    logp = kept + (top - tl.load(lse_ptr + row))[:, None]
    pull = by_logprob
    if ENTROPY:
        pull += tl.load(by_entropy_ptr + row) * scale * (logp + tl.load(row_entropy_ptr + row))
    grad = tl.where(column == tl.load(target_ptr + row), by_logprob, 0.0) - tl.exp2(logp * LOG2E) * pull
    tl.store(grad_ptr + place, grad.to(grad_ptr.dtype.element_ty), mask=inside)


@triton.jit
def kept_logp(
    kept_ptr,  # fp16, what KEEP stored
    top_ptr,
    row,
    lse,
    tile,
    tiles,
    place,
    inside,
):
    """Log-probs of some tiles of a row, and those tiles' logits relative to their maxima."""
    top = tl.load(top_ptr + row * tiles + tile, mask=tile < tiles, other=0.0)
    kept = tl.load(kept_ptr + place, mask=inside, other=0.0).to(tl.float32)
    return kept + (top - lse)[:, None], kept, top


@triton.jit(do_not_specialize=["n", "eights", "columns", "tiles"])
def draft_sums(
    draft_ptr,  # fp16 [n, c], padded in memory to 8 x `eights` columns: what KEEP stored
    draft_top_ptr,  # fp32 [n, T]
    draft_lse_ptr,
    best_ptr,  # fp32 [n]: the largest of the draft's logits
    teacher_ptr,  # [·, c] as above, with its tops
    teacher_top_ptr,
    teacher_lse_ptr,  # fp32 [n]
    teacher_row_ptr,  # int64 [n]
    partial_ptr,  # fp32 [4, P, n]: overlap, below, cost, the teacher's log-prob of the draft's first choice
    n,
    eights,
    columns,
    tiles,
    BN: tl.constexpr,
    TILES: tl.constexpr,  # how many one program does at once
    STEPS: tl.constexpr,  # how many times
    LOSS: tl.constexpr,
):
    programs = tl.cdiv(tiles, TILES * STEPS)
    row = (tl.program_id(0) // programs).to(tl.int64)
    part = tl.program_id(0) % programs
    there = tl.load(teacher_row_ptr + row)
    draft_lse = tl.load(draft_lse_ptr + row)
    teacher_lse = tl.load(teacher_lse_ptr + row)
    best = tl.load(best_ptr + row)
    overlap = tl.zeros((TILES, BN), dtype=tl.float32)
    below = tl.zeros((TILES, BN), dtype=tl.float32)
    cost = tl.zeros((TILES, BN), dtype=tl.float32)
    first_choice = float("-inf")
    mine = part * (TILES * STEPS) + tl.arange(0, TILES * STEPS)
    holds_best = tl.max(tl.load(draft_top_ptr + row * tiles + mine, mask=mine < tiles, other=FLOOR), 0) >= best
    for step in range(STEPS):
        tile = (part * STEPS + step) * TILES + tl.arange(0, TILES)
        column = tile[:, None] * BN + tl.arange(0, BN)[None, :]
        inside = column < eights * 8
        logq, kept, top = kept_logp(draft_ptr, draft_top_ptr, row, draft_lse, tile, tiles, row * (eights * 8) + column, inside)
        logp, _, _ = kept_logp(teacher_ptr, teacher_top_ptr, there, teacher_lse, tile, tiles, there * (eights * 8) + column, inside)
        logq = tl.where(column < columns, logq, FLOOR)
        logp = tl.where(column < columns, logp, FLOOR)
        q = tl.exp2(logq * LOG2E)
        p = tl.exp2(logp * LOG2E)
        overlap += tl.minimum(p, q)
        if LOSS == "tv":
            below += tl.where(logq < logp, q, 0.0)
        elif LOSS == "kl":
            cost += p * (logp - logq)
        elif LOSS == "soft_ce":
            cost -= p * logq
        if holds_best:
            first = (kept == 0) & (top[:, None] == best) & (column < columns)
            place = tl.min(tl.min(tl.where(first, column, 2147483647), 1), 0)
            here = tl.max(tl.max(tl.where(column == place, logp, float("-inf")), 1), 0)
            first_choice = tl.where(first_choice == float("-inf"), here, first_choice)
    partial = partial_ptr + part * n + row
    stride = programs * n
    tl.store(partial, tl.sum(tl.sum(overlap, 1), 0))
    tl.store(partial + stride, tl.sum(tl.sum(below, 1), 0))
    tl.store(partial + 2 * stride, tl.sum(tl.sum(cost, 1), 0))
    tl.store(partial + 3 * stride, first_choice)


@triton.jit(do_not_specialize=["eights", "tiles"])
def draft_grads(
    draft_ptr,  # as in `draft_sums`
    draft_top_ptr,
    draft_lse_ptr,
    teacher_ptr,
    teacher_top_ptr,
    teacher_lse_ptr,
    teacher_row_ptr,
    grad_ptr,  # the draft's memory, in the operands' dtype: overwritten with the gradient of the unscaled logits
    target_ptr,  # int64 [n], counted from the first column
    scale_ptr,  # fp32 [n], inverse temperature
    own_ptr,  # fp32 [n]
    by_teacher,
    by_label,
    eights,
    tiles,
    BN: tl.constexpr,
    TILES: tl.constexpr,  # how many one program does
    TOTAL_VARIATION: tl.constexpr,
):
    programs = tl.cdiv(tiles, TILES)
    row = (tl.program_id(0) // programs).to(tl.int64)
    tile = (tl.program_id(0) % programs) * TILES + tl.arange(0, TILES)
    there = tl.load(teacher_row_ptr + row)
    column = tile[:, None] * BN + tl.arange(0, BN)[None, :]
    inside = column < eights * 8
    place = row * (eights * 8) + column
    logq, _, _ = kept_logp(draft_ptr, draft_top_ptr, row, tl.load(draft_lse_ptr + row), tile, tiles, place, inside)
    logp, _, _ = kept_logp(
        teacher_ptr, teacher_top_ptr, there, tl.load(teacher_lse_ptr + row), tile, tiles, there * (eights * 8) + column, inside
    )
    own = tl.load(own_ptr + row)
    q = tl.exp2(logq * LOG2E)
    learned = tl.where(logq < logp, q, 0.0) if TOTAL_VARIATION else tl.exp2(logp * LOG2E)
    grad = (q * own - learned * by_teacher - tl.where(column == tl.load(target_ptr + row), by_label, 0.0)) * tl.load(scale_ptr + row)
    tl.store(grad_ptr + place, grad.to(grad_ptr.dtype.element_ty), mask=inside)
