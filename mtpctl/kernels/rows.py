"""Order of the rows of an MoE layer: a token has one row for each of its experts, and rows are sorted by expert.

The rows of the first rank's experts come first. Within a rank the rows of the last expert come first, because its weights come first in
memory (`mtpctl.model.experts`). On CUDA three Triton kernels compute the order without a host synchronization: `count_rows_kernel` counts
the rows of each expert in each block of tokens, `sum_counts_kernel` sums the counts over blocks, and `place_rows_kernel` writes the
indices. In all three kernels a column stands for an expert, and columns follow the order of the rows. With expert parallelism, the
copies of tokens are sorted by destination rank in the same way: a column stands for a rank, and `count_destinations_kernel` replaces
`count_rows_kernel`.

Shape legend: T tokens, k experts per token (at most), E experts in total, R rows, H hidden size. R is T k if each token has k experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpctl.kernels.triton_support import launcher, on_device_of, tl, triton

TILE_ELEMENTS = 8192
"""Tokens times experts per program of `count_rows_kernel` and `place_rows_kernel`."""
DESTINATION_TOKENS = 64
"""Tokens per program of `count_destinations_kernel`."""
COUNT_COLUMNS = 32
"""Columns per program of `sum_counts_kernel`."""
SUM_COLUMNS = 1024
"""Columns per program of `sum_rows_kernel`."""


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """The order of rows by expert. All tensors are int32 except `pair_of`.

    row_of [T, k]: indices of each token's rows, ascending, then -1 if the token has fewer than k. token_of [R]: token of each row.
    pair_of [R] int64: index of each row's (token, expert) pair in the flattened [T, E]. ends [E]: end of each expert's rows, in the order
    of the rows.
    """

    row_of: Tensor
    token_of: Tensor
    pair_of: Tensor
    ends: Tensor


@dataclass(frozen=True, slots=True)
class Destinations:
    """For each token, the ranks that have its experts.

    mask [T, ranks] bool. counts [2, ranks]: number of this rank's tokens and rows for each rank. block_counts, block: on CUDA, the input of
    `place_rows_kernel` and its tokens per program.
    """

    mask: Tensor
    counts: Tensor
    block_counts: Tensor | None = None
    block: int = 0

    def order(self, k: int) -> ExpertOrder:
        """The order of the copies of tokens by rank, like the order of rows by expert.

        k: maximum number of ranks per token. On CUDA, token_of and pair_of have k entries per token, undefined ones at the end.
        """
        if self.block_counts is None:
            return expert_order_torch(self.mask, k, self.mask.shape[1])
        return _place_rows(self.mask, k, self.mask.shape[1], len(self.mask) * k, self.block_counts, self.counts[0], self.block, 0)


def expert_order(routes: Tensor, k: int, ranks: int, rows: int | None = None, *, unrouted: float = 0) -> ExpertOrder:
    """Order the (token, expert) pairs of `routes` [T, E] by expert: a bool mask, or numbers that are `unrouted` for experts not used.

    rows: number of set entries, at most k per token, or an upper bound (on CUDA, the results then have undefined rows at the end);
    by default each token has exactly k. ranks: expert-parallel ranks, each with E / ranks consecutive experts. On CUDA a token's entries
    must be contiguous.
    """
    if routes.is_cuda:
        return expert_order_triton(routes, k, ranks, rows, unrouted)
    return expert_order_torch(routes != unrouted, k, ranks)


def count_destinations(routes: Tensor, ranks: int) -> Destinations:
    """Count this rank's tokens and rows for each rank. routes [T, E]: contiguous bool mask of each token's experts."""
    if routes.is_cuda:
        return count_destinations_triton(routes, ranks)
    experts_by_rank = routes.unflatten(1, (ranks, -1))
    mask = experts_by_rank.any(2)
    return Destinations(mask, torch.stack([mask.sum(0), experts_by_rank.sum((0, 2))]).to(torch.int32))


def expert_order_torch(routes: Tensor, k: int, ranks: int) -> ExpertOrder:
    tokens, experts = routes.shape
    expert_of_column = torch.arange(experts, dtype=torch.int32, device=routes.device).view(ranks, -1).flip(1).flatten()
    column_of, token_of = routes.index_select(1, expert_of_column).t().nonzero(as_tuple=True)
    token_order = token_of.argsort(stable=True)
    tokens_sorted = token_of[token_order]
    slots = torch.arange(len(token_order), device=routes.device) - torch.searchsorted(tokens_sorted, tokens_sorted)
    row_of = token_of.new_full((tokens, k), -1, dtype=torch.int32)
    row_of[tokens_sorted, slots] = token_order.to(torch.int32)
    ends = column_of.bincount(minlength=experts).cumsum(0, dtype=torch.int32)
    return ExpertOrder(row_of, token_of.to(torch.int32), token_of * experts + expert_of_column[column_of], ends)


def row_sums(rows: Tensor, row_of: Tensor) -> Tensor:
    """rows [R, H], row_of [T, k] int32, -1 for no row → [T, H]: the sum of each token's rows, accumulated in fp32. Not differentiable.

    With k = 1, each token must have a row.
    """
    if row_of.shape[1] == 1:
        return rows.index_select(0, row_of.flatten())
    if rows.is_cuda:
        return row_sums_triton(rows, row_of)
    missing = row_of < 0
    if missing.any():
        rows, row_of = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), row_of.masked_fill(missing, len(rows))
    return F.embedding_bag(row_of, rows, mode="sum")


def distinct_rows(x: Tensor, indices: Tensor) -> Tensor:
    """x [n, …] → x[indices] [r, …], for indices without duplicates.

    The backward pass of `x[indices]` sorts the indices to accumulate gradients of duplicates; here it only copies.
    """
    return _DistinctRows.apply(x, indices)


class _DistinctRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.shape = x.shape
        return x.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (indices,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.shape).index_copy_(0, indices, grads[0]), None


@triton.jit
@no_type_check
def _load_visits(routes_ptr, stride, tokens, experts, local, BLOCK: tl.constexpr, EXPERTS: tl.constexpr, UNROUTED: tl.constexpr):
    """Whether each token of this program's block is routed to the expert of each column (1 or 0), and the columns' experts."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, EXPERTS)
    expert = (column // local) * local + (local - 1 - column % local)
    inside = (token < tokens)[:, None] & (column < experts)[None, :]
    routes = tl.load(routes_ptr + token.to(tl.int64)[:, None] * stride + expert[None, :], mask=inside, other=UNROUTED)
    return (routes != UNROUTED).to(tl.int32), expert


@triton.jit
@no_type_check
def count_rows_kernel(
    routes_ptr,  # bytes or numbers [T, E]
    counts_ptr,  # int32 [blocks, E]
    stride,  # of routes
    tokens,
    experts,
    local,  # experts per rank
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    UNROUTED: tl.constexpr,
):
    visits, _expert = _load_visits(routes_ptr, stride, tokens, experts, local, BLOCK, EXPERTS, UNROUTED)
    column = tl.arange(0, EXPERTS)
    tl.store(counts_ptr + tl.program_id(0) * experts + column, tl.sum(visits, 0), mask=column < experts)


@triton.jit
@no_type_check
def count_destinations_kernel(
    routes_ptr,  # bytes [T, E]
    mask_ptr,  # bytes [T, ranks]
    counts_ptr,  # int32 [blocks, 2 ranks]: tokens for each rank, rows for each rank
    tokens,
    ranks,
    local,  # experts per rank
    BLOCK: tl.constexpr,
    LOCAL: tl.constexpr,
):
    token = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    nth = tl.arange(0, LOCAL)
    for rank in range(ranks):
        inside = (token < tokens)[:, None] & (nth < local)[None, :]
        routes = tl.load(routes_ptr + (token * ranks + rank)[:, None] * local + nth[None, :], mask=inside, other=0)
        rows = tl.sum((routes != 0).to(tl.int32), 1)
        visited = (rows > 0).to(tl.int32)
        tl.store(mask_ptr + token * ranks + rank, visited.to(tl.uint8), mask=token < tokens)
        counts = counts_ptr + tl.program_id(0) * 2 * ranks + rank
        tl.store(counts, tl.sum(visited, 0))
        tl.store(counts + ranks, tl.sum(rows, 0))


@triton.jit
@no_type_check
def sum_counts_kernel(
    counts_ptr,  # int32 [blocks, columns]: before: the count of each block; after: the sum of the counts of all earlier blocks
    total_ptr,  # int32 [columns]
    blocks,
    columns,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.zeros((COLUMNS,), dtype=tl.int32)
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        inside = (block < blocks)[:, None] & (column < columns)[None, :]
        pointers = counts_ptr + block[:, None] * columns + column[None, :]
        counts = tl.load(pointers, mask=inside, other=0)
        tl.store(pointers, before[None, :] + tl.cumsum(counts, 0) - counts, mask=inside)
        before += tl.sum(counts, 0)
    tl.store(total_ptr + column, before, mask=column < columns)


@triton.jit
@no_type_check
def place_rows_kernel(
    routes_ptr,  # bytes or numbers [T, E]
    before_ptr,  # int32 [blocks, E]: an expert's rows in earlier blocks
    total_ptr,  # int32 [E]
    row_of_ptr,  # int32 [T, k]
    token_of_ptr,  # int32 [R]
    pair_of_ptr,  # int64 [R]
    ends_ptr,  # int32 [E]
    stride,  # of routes
    before_stride,
    tokens,
    experts,
    local,
    k,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    UNROUTED: tl.constexpr,
):
    visits, expert = _load_visits(routes_ptr, stride, tokens, experts, local, BLOCK, EXPERTS, UNROUTED)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, EXPERTS)
    total = tl.load(total_ptr + column, mask=column < experts, other=0)
    before = tl.load(before_ptr + tl.program_id(0) * before_stride + column, mask=column < experts, other=0)
    ends = tl.cumsum(total, 0)
    tl.store(ends_ptr + column, ends, mask=(column < experts) & (tl.program_id(0) == 0))
    row = (ends - total + before)[None, :] + tl.cumsum(visits, 0) - 1
    nth = tl.cumsum(visits, 1) - 1
    chosen = visits != 0
    slots = row_of_ptr + token.to(tl.int64)[:, None] * k
    tl.store(slots + nth, row, mask=chosen & (nth < k))
    missing = (column[None, :] >= tl.sum(visits, 1)[:, None]) & (column < k)[None, :] & (token < tokens)[:, None]
    tl.store(slots + column[None, :], tl.full((BLOCK, EXPERTS), -1, tl.int32), mask=missing)
    tl.store(token_of_ptr + row, tl.broadcast_to(token[:, None], (BLOCK, EXPERTS)), mask=chosen)
    tl.store(pair_of_ptr + row, token.to(tl.int64)[:, None] * experts + expert[None, :], mask=chosen)


@triton.jit
@no_type_check
def sum_rows_of_token(rows_ptr, stride, row_of_ptr, token, column, inside, K: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of a token's rows in fp32, at these columns. row_of_ptr: int32 [T, K], -1 for no row."""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for nth in tl.static_range(K):
        row = tl.load(row_of_ptr + token * K + nth).to(tl.int64)
        total += tl.load(rows_ptr + row * stride + column, mask=inside & (row >= 0), other=0.0).to(tl.float32)
    return total


@triton.jit
@no_type_check
def sum_rows_kernel(
    rows_ptr,  # [R, H]
    row_of_ptr,  # int32 [T, k], -1 for no row
    out_ptr,  # [T, H]
    width,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = sum_rows_of_token(rows_ptr, width, row_of_ptr, token, column, inside, K, BLOCK)
    tl.store(out_ptr + token * width + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def expert_order_triton(routes: Tensor, k: int, ranks: int, rows: int | None, unrouted: float = 0) -> ExpertOrder:
    tokens, experts = routes.shape
    width = triton.next_power_of_2(experts)
    block = max(1, TILE_ELEMENTS // width)
    blocks = triton.cdiv(tokens, block)
    counts = torch.empty(blocks + 1, experts, dtype=torch.int32, device=routes.device)
    with on_device_of(routes):
        launcher(count_rows_kernel, (blocks,))(
            _as_bytes(routes), counts, routes.stride(0), tokens, experts, experts // ranks, BLOCK=block, EXPERTS=width, UNROUTED=unrouted
        )
    _sum_counts(counts)
    return _place_rows(routes, k, ranks, tokens * k if rows is None else rows, counts, counts[blocks], block, unrouted)


def count_destinations_triton(routes: Tensor, ranks: int) -> Destinations:
    tokens, experts = routes.shape
    block, local = DESTINATION_TOKENS, experts // ranks
    blocks = triton.cdiv(tokens, block)
    mask = routes.new_empty(tokens, ranks)
    counts = torch.empty(blocks + 1, 2 * ranks, dtype=torch.int32, device=routes.device)
    with on_device_of(routes):
        launcher(count_destinations_kernel, (blocks,))(
            _as_bytes(routes), _as_bytes(mask), counts, tokens, ranks, local, BLOCK=block, LOCAL=triton.next_power_of_2(local)
        )
    _sum_counts(counts)
    return Destinations(mask, counts[blocks].view(2, ranks), counts, block)


def _as_bytes(routes: Tensor) -> Tensor:
    return routes.view(torch.uint8) if routes.dtype == torch.bool else routes


def _sum_counts(counts: Tensor) -> None:
    """Replace the counts [blocks + 1, columns] of each block by their sums over earlier blocks; the last row becomes the totals."""
    blocks, columns = len(counts) - 1, counts.shape[1]
    with on_device_of(counts):
        launcher(sum_counts_kernel, (triton.cdiv(columns, COUNT_COLUMNS),))(
            counts, counts[blocks], blocks, columns, BLOCKS=128, COLUMNS=COUNT_COLUMNS
        )


def _place_rows(
    routes: Tensor, k: int, ranks: int, rows: int, block_counts: Tensor, totals: Tensor, block: int, unrouted: float
) -> ExpertOrder:
    """The order of `routes` [T, E] from the counts of blocks of `block` tokens (see `_sum_counts`) and each column's `totals` [E]."""
    tokens, experts = routes.shape
    row_of, token_of, pair_of, ends = (
        torch.empty(shape, dtype=dtype, device=routes.device)
        for shape, dtype in (((tokens, k), torch.int32), (rows, torch.int32), (rows, torch.int64), (experts, torch.int32))
    )
    if not tokens:
        return ExpertOrder(row_of, token_of, pair_of, ends.zero_())
    with on_device_of(routes):
        launcher(place_rows_kernel, (triton.cdiv(tokens, block),))(
            _as_bytes(routes), block_counts, totals, row_of, token_of, pair_of, ends, routes.stride(0), block_counts.stride(0),
            tokens, experts, experts // ranks, k, BLOCK=block, EXPERTS=triton.next_power_of_2(experts), UNROUTED=unrouted,
        )  # fmt: skip
    return ExpertOrder(row_of, token_of, pair_of, ends)


def row_sums_triton(rows: Tensor, row_of: Tensor) -> Tensor:
    tokens, k, width = *row_of.shape, rows.shape[1]
    out = rows.new_empty(tokens, width)
    with on_device_of(rows):
        launcher(sum_rows_kernel, (tokens, triton.cdiv(width, SUM_COLUMNS)))(rows, row_of, out, width, K=k, BLOCK=SUM_COLUMNS)
    return out
