"""The experts of `numerics: bitwise`: `mtpctl.kernels.exact`'s sums on a CPU, and on CUDA sums in a fixed order.

Engine and trainer compute experts alike, with the same roundings:

    logits      fp32, products of states and the router's weight in their own dtype
    selection   the k largest logits; ties go to the lower expert index
    probs       fp32, from the logits of a token and its experts; the experts may be replayed ones
    experts     each expert's rows in one product per layer; a row's prob scales the activation's output before it is rounded
    output      the sum of a token's rows in fp32, from its last expert to its first

These functions have no gradients; `mtpctl.kernels.exact_grad` adds them.

Shape legend: T tokens, E experts, k experts per token, R = T k rows, H hidden size, n inputs, N outputs.
"""

from __future__ import annotations

from typing import no_type_check

import torch
from torch import Tensor

from mtpctl.kernels import exact, invariant
from mtpctl.kernels.invariant import BLOCK_K, Tile, _aligned, _store
from mtpctl.kernels.routing import TILE_ELEMENTS, _probs, _tile
from mtpctl.kernels.rows import expert_order, row_sums
from mtpctl.kernels.triton_support import TensorDescriptor, on_device_of, tl, triton

FEW_ROWS, MANY_ROWS = Tile(64, 128, 4, 4), Tile(128, 128, 8, 4)


def top_experts(logits: Tensor, k: int) -> Tensor:
    """int64 [T, k]: each token's experts with the largest logits [T, E]."""
    return logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def route_mask(experts: Tensor, count: int) -> Tensor:
    """bool [T, E]: whether each of `count` experts is among a token's `experts` [T, k]."""
    return torch.zeros(len(experts), count, dtype=torch.bool, device=experts.device).scatter_(1, experts, True)


def chosen_probs(logits: Tensor, routes: Tensor, *, over_all: bool) -> Tensor:
    """Probs fp32 [T, E] of the experts in `routes` [T, E], 0 for others: a softmax over these, or over all experts if `over_all`."""
    return (
        chosen_probs_triton(logits, routes, over_all=over_all) if logits.is_cuda else chosen_probs_torch(logits, routes, over_all=over_all)
    )


def grouped_linear(x: Tensor, ends: Tensor, weights: Tensor, *, reverse: bool = False) -> Tensor:
    """x [R, n], sorted by group · each group's weightᵀ [N, n] → [R, N]. `ends` [E] int32: end of each group's rows.

    reverse: the first group has the last of `weights` [E, N, n].
    """
    run = grouped_linear_triton if x.is_cuda else grouped_linear_torch
    return run(x, ends, weights, reverse=reverse)


def run_experts(x: Tensor, logits: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, *, over_all: bool) -> Tensor:
    """The output [T, H] of a mixture of experts for states x [T, H].

    logits: fp32 [T, E]. experts: int64 [T, k]. gate_up [E, 2 F, H] and down [E, H, F]: the experts' weights. over_all: see `chosen_probs`.
    """
    routes = route_mask(experts, logits.shape[1])
    order = expert_order(routes, experts.shape[1], 1)
    probs = chosen_probs(logits, routes, over_all=over_all).flatten().index_select(0, order.pair_of)
    inner = grouped_linear(x.index_select(0, order.token_of), order.ends, gate_up, reverse=True)
    swiglu = invariant.swiglu if x.is_cuda else exact.swiglu
    return row_sums(grouped_linear(swiglu(inner, probs), order.ends, down, reverse=True), order.row_of)


# ------------------------------------------------------------------------------------------------------------ on a CPU


def chosen_probs_torch(logits: Tensor, routes: Tensor, *, over_all: bool) -> Tensor:
    included = torch.ones_like(routes) if over_all else routes
    scores = logits.double()
    top = scores.masked_fill(~included, float("-inf")).amax(-1, keepdim=True)
    weights = exact.exp(scores - top).masked_fill_(~included, 0.0)
    return (weights / exact.fixed_point_sum(weights, logits.shape[1])).masked_fill_(~routes, 0.0).float()


def grouped_linear_torch(x: Tensor, ends: Tensor, weights: Tensor, *, reverse: bool = False) -> Tensor:
    rows = x.tensor_split(ends[:-1].cpu().long())
    return torch.cat([exact.linear(part, weight) for part, weight in zip(rows, weights.flip(0) if reverse else weights, strict=True)])


# ------------------------------------------------------------------------------------------------------------ on CUDA


def chosen_probs_triton(logits: Tensor, routes: Tensor, *, over_all: bool) -> Tensor:
    logits, routes = logits.contiguous(), routes.contiguous()
    probs, (tokens, experts) = torch.empty_like(logits), logits.shape
    width = triton.next_power_of_2(experts)
    block = max(1, TILE_ELEMENTS // width)
    if tokens:
        with on_device_of(logits):
            chosen_probs_kernel[(triton.cdiv(tokens, block),)](
                logits, routes.view(torch.uint8), probs, tokens, experts, OF_ALL=over_all, TOKENS=block, EXPERTS=width
            )
    return probs


def grouped_linear_triton(x: Tensor, ends: Tensor, weights: Tensor, *, reverse: bool = False) -> Tensor:
    """On CUDA. n must be a multiple of 8."""
    invariant.check_dtypes(x, weights)
    rows, (groups, columns, width) = len(x), weights.shape
    out = x.new_empty(rows, columns)
    if not out.numel():
        return out
    tile = MANY_ROWS if rows > MANY_ROWS.rows * groups else FEW_ROWS
    # Every group may have one partly filled tile.
    programs = (triton.cdiv(rows, tile.rows) + groups) * triton.cdiv(columns, tile.columns)
    a = TensorDescriptor.from_tensor(_aligned(x), [tile.rows, BLOCK_K])
    b = TensorDescriptor.from_tensor(_aligned(weights.flatten(0, 1)), [tile.columns, BLOCK_K])
    with on_device_of(x):
        grouped_linear_kernel[(programs,)](
            a, b, out, ends, groups, columns, width,
            REVERSE=reverse, BM=tile.rows, BN=tile.columns, BK=BLOCK_K, GROUPS=triton.next_power_of_2(groups),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens"])
@no_type_check
def chosen_probs_kernel(
    logits_ptr,  # fp32 [T, E]
    routes_ptr,  # bytes [T, E]
    probs_ptr,  # fp32 [T, E]
    tokens,
    experts,
    OF_ALL: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    _token, column, inside, index = _tile(tokens, experts, TOKENS, EXPERTS)
    logits = tl.load(logits_ptr + index, mask=inside, other=0.0)
    chosen = tl.load(routes_ptr + index, mask=inside, other=0) != 0
    probs = _probs(logits, chosen, column, experts, False, OF_ALL, False)
    tl.store(probs_ptr + index, tl.where(chosen, probs, 0.0), mask=inside)


@triton.jit
@no_type_check
def grouped_linear_kernel(
    x,  # descriptor [R, n], block [BM, BK]
    weight,  # descriptor [E N, n], block [BN, BK]
    out_ptr,  # [R, N]
    ends_ptr,  # int32 [E]
    groups,
    columns,
    width,
    REVERSE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    column_tiles = tl.cdiv(columns, BN)
    row_tile, column0 = tl.program_id(0) // column_tiles, (tl.program_id(0) % column_tiles) * BN
    index = tl.arange(0, GROUPS)
    ends = tl.load(ends_ptr + index, mask=index < groups, other=0)
    starts = tl.load(ends_ptr + index - 1, mask=(index > 0) & (index < groups), other=0)
    tiles = tl.where(index < groups, (ends - starts + BM - 1) // BM, 0)
    tile_ends = tl.cumsum(tiles, 0)
    group = tl.sum((tile_ends <= row_tile).to(tl.int32), 0)
    if group < groups:
        here = index == group
        first = tl.sum(tl.where(here, tile_ends - tiles, 0), 0)
        row0 = tl.sum(tl.where(here, starts, 0), 0) + (row_tile - first) * BM
        end = tl.sum(tl.where(here, ends, 0), 0)
        expert = groups - 1 - group if REVERSE else group
        sums = tl.zeros((BM, BN), dtype=tl.float32)
        for step in range(tl.cdiv(width, BK)):
            a = x.load([row0, step * BK])
            b = weight.load([expert * columns + column0, step * BK])
            sums = tl.dot(a, b.T, sums)
        # Rows after the group's end, and columns after the expert's last, belong to others and are not stored.
        _store(out_ptr, sums, row0 + tl.arange(0, BM), column0 + tl.arange(0, BN), end, columns)
