# mypy: disallow-untyped-defs=False
# (what is inside a Triton kernel has no Python types)
"""Triton kernels that sort the rows of tokens by expert, in three steps.

`count_rows` counts the rows of each expert in each block of tokens, `sum_counts` sums these counts over the blocks, and `place_rows` writes
the place of each row. Columns are experts in the order of the rows: column c of a rank is the c-th of its experts, counted from the last.
The shape legend is that of `mtpctl.kernels.order`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpctl.kernels.triton_backend import on_device_of

ELEMENTS = 8192
"""Tokens times experts that one program of `count_rows` and `place_rows` takes."""
SUMMED = 32
"""Columns that one program of `sum_counts` takes."""


@triton.jit
def _taken(routes_ptr, tokens, experts, local, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """Which tokens of this program's block visit the expert of each column (1, else 0), and the experts of the columns."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, EXPERTS)
    expert = (column // local) * local + (local - 1 - column % local)
    inside = (token < tokens)[:, None] & (column < experts)[None, :]
    routes = tl.load(routes_ptr + token.to(tl.int64)[:, None] * experts + expert[None, :], mask=inside, other=0)
    return (routes != 0).to(tl.int32), expert


@triton.jit
def count_rows(
    routes_ptr,  # bytes [T, E]
    counts_ptr,  # int32 [blocks, E]
    tokens,
    experts,
    local,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    taken, _expert = _taken(routes_ptr, tokens, experts, local, BLOCK, EXPERTS)
    column = tl.arange(0, EXPERTS)
    tl.store(counts_ptr + tl.program_id(0) * experts + column, tl.sum(taken, 0), mask=column < experts)


@triton.jit
def sum_counts(
    counts_ptr,  # int32 [blocks, E]: rows in each block on entry, rows in all earlier blocks on return
    total_ptr,  # int32 [E]
    blocks,
    experts,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.zeros((COLUMNS,), dtype=tl.int32)
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        inside = (block < blocks)[:, None] & (column < experts)[None, :]
        place = counts_ptr + block[:, None] * experts + column[None, :]
        counts = tl.load(place, mask=inside, other=0)
        tl.store(place, before[None, :] + tl.cumsum(counts, 0) - counts, mask=inside)
        before += tl.sum(counts, 0)
    tl.store(total_ptr + column, before, mask=column < experts)


@triton.jit
def place_rows(
    routes_ptr,  # bytes [T, E]
    before_ptr,  # int32 [blocks, E]: an expert's rows in earlier blocks
    total_ptr,  # int32 [E]
    row_of_ptr,  # int32 [T, k]
    token_of_ptr,  # int32 [R]
    pair_of_ptr,  # int64 [R]
    tokens,
    experts,
    local,
    k,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    taken, expert = _taken(routes_ptr, tokens, experts, local, BLOCK, EXPERTS)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, EXPERTS)
    total = tl.load(total_ptr + column, mask=column < experts, other=0)
    before = tl.load(before_ptr + tl.program_id(0) * experts + column, mask=column < experts, other=0)
    row = (tl.cumsum(total, 0) - total + before)[None, :] + tl.cumsum(taken, 0) - 1
    nth = tl.cumsum(taken, 1) - 1
    chosen = taken != 0
    tl.store(row_of_ptr + token.to(tl.int64)[:, None] * k + nth, row, mask=chosen & (nth < k))
    tl.store(token_of_ptr + row, tl.broadcast_to(token[:, None], (BLOCK, EXPERTS)), mask=chosen)
    tl.store(pair_of_ptr + row, token.to(tl.int64)[:, None] * experts + expert[None, :], mask=chosen)


def expert_order(routes: Tensor, k: int, ranks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`mtpctl.kernels.order.expert_order` on a card: row_of [T, k], token_of [R], pair_of [R] and counts [E]."""
    tokens, experts = routes.shape
    width = triton.next_power_of_2(experts)
    block = max(1, ELEMENTS // width)
    blocks = triton.cdiv(tokens, block)
    bytes_ = routes.contiguous().view(torch.uint8)
    row_of, token_of = routes.new_empty(tokens, k, dtype=torch.int32), routes.new_empty(tokens * k, dtype=torch.int32)
    pair_of = routes.new_empty(tokens * k, dtype=torch.int64)
    counts = routes.new_empty(blocks + 1, experts, dtype=torch.int32)
    before, total = counts[:blocks], counts[blocks]
    shape = {"BLOCK": block, "EXPERTS": width}
    with on_device_of(routes):
        count_rows[(blocks,)](bytes_, before, tokens, experts, experts // ranks, **shape)
        sum_counts[(triton.cdiv(experts, SUMMED),)](before, total, blocks, experts, BLOCKS=128, COLUMNS=SUMMED)
        place_rows[(blocks,)](bytes_, before, total, row_of, token_of, pair_of, tokens, experts, experts // ranks, k, **shape)
    return row_of, token_of, pair_of, total
