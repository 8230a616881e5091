"""Messages between expert-parallel ranks. A row has the hidden state of a token, and its probs for the experts of the receiving rank.

    row of a message = state [H] | padding | probs of the rank's experts, UNROUTED for experts that the token does not use | padding

Both parts start at multiples of 16 bytes. State and probs are sent together, because the host takes longer to start an exchange than the
GPU takes to run it. A group is the part of a token's probs that one row carries: in a message the probs for the E / ranks experts of a
rank, after `unpack` the single prob for the row's expert.

Gradients of a message have the same layout. On CUDA one Triton kernel gathers states and probs, and one sums their gradients.

Shape legend: T tokens, E experts in total, C copies (rows of a message), R rows of a rank's experts, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import torch
from torch import Tensor

from mtpctl.kernels.rows import ExpertOrder, row_sums, sum_rows_of_token
from mtpctl.kernels.triton_support import launcher, on_device_of, tl, triton

UNROUTED = -1.0
"""Prob of an expert that a token does not use. Probs are not negative."""
ALIGNMENT = 16
"""Alignment of the parts of a message, in bytes."""
BLOCK_COLUMNS = 1024
"""Columns per program."""


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """The layout of a message.

    width, dtype: hidden size and dtype of the states. experts: number of experts per rank. prob_dtype: dtype of the probs.
    """

    width: int
    dtype: torch.dtype
    experts: int
    prob_dtype: torch.dtype

    def pack(self, states: Tensor, probs: Tensor, routes: Tensor, order: ExpertOrder) -> Tensor:
        """The message [C, …] from states [T, H], probs [T, E] and routes [T, E], a bool mask of each token's experts.

        order: the order of the tokens' copies by rank.
        """
        message = self._empty(len(order.token_of), states.device)
        _gather(states.contiguous(), probs.contiguous(), routes.contiguous(), order, *self.split(message), group=self.experts)
        return message

    def unpack(self, message: Tensor, order: ExpertOrder) -> tuple[Tensor, Tensor]:
        """Rows [R, H] and their probs [R]. order: of the rows by expert; its `token_of` indexes rows of the message."""
        states, probs = self.split(message)
        rows, row_probs = states.new_empty(len(order.token_of), self.width), probs.new_empty(len(order.token_of))
        _gather(states, probs, None, order, rows, row_probs[:, None], group=1)
        return rows, row_probs

    def pack_grads(self, rows_grad: Tensor, row_probs_grad: Tensor, order: ExpertOrder) -> Tensor:
        """The gradient of a message from the gradients of `unpack`'s results."""
        message = self._empty(len(order.row_of), rows_grad.device)
        _sum(rows_grad.contiguous(), row_probs_grad[:, None], order, *self.split(message), group=1)
        return message

    def unpack_grads(self, message: Tensor, order: ExpertOrder, ranks: int) -> tuple[Tensor, Tensor]:
        """The gradients of `pack`'s states and probs from the message's. Zero for probs of experts that a token does not use."""
        states, probs = self.split(message)
        states_grad = states.new_empty(len(order.row_of), self.width)
        probs_grad = probs.new_empty(len(order.row_of), ranks * self.experts)
        _sum(states, probs, order, states_grad, probs_grad, group=self.experts)
        return states_grad, probs_grad

    def split(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Views of a message's states [C, H] and probs [C, E / ranks]."""
        start = _padded(self.width * self.dtype.itemsize) // self.prob_dtype.itemsize
        return message[:, : self.width], message.view(self.prob_dtype)[:, start : start + self.experts]

    def _empty(self, rows: int, device: torch.device) -> Tensor:
        row_bytes = _padded(self.width * self.dtype.itemsize) + _padded(self.experts * self.prob_dtype.itemsize)
        return torch.empty(rows, row_bytes // self.dtype.itemsize, dtype=self.dtype, device=device)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _gather(
    states: Tensor, probs: Tensor, routes: Tensor | None, order: ExpertOrder, rows: Tensor, row_probs: Tensor, *, group: int
) -> None:
    """Copy the state of each row's token to `rows` [R, H], and its group of probs to `row_probs` [R, group].

    probs [T, groups · group]; if `routes` is set, probs outside it are copied as UNROUTED. order: its `pair_of` indexes the T · groups
    groups.
    """
    if states.is_cuda:
        gather_triton(states, probs, routes, order, rows, row_probs, group=group)
        return
    rows.copy_(states.index_select(0, order.token_of))
    if routes is not None:
        probs = probs.masked_fill(~routes, UNROUTED)
    row_probs.copy_(probs.reshape(-1, group).index_select(0, order.pair_of))


def _sum(rows: Tensor, row_probs: Tensor, order: ExpertOrder, states: Tensor, probs: Tensor, *, group: int) -> None:
    """The transpose of `_gather`: sum each token's rows to `states` [T, H], and copy their probs to `probs`, zero for other groups."""
    if rows.is_cuda:
        sum_triton(rows, row_probs, order, states, probs, group=group)
        return
    states.copy_(row_sums(rows.contiguous(), order.row_of))
    groups = row_probs.new_zeros(probs.numel() // group, group).index_copy_(0, order.pair_of, row_probs.contiguous())
    probs.copy_(groups.view(probs.shape))


@triton.jit
@no_type_check
def gather_kernel(
    states_ptr,  # [T, H]
    probs_ptr,  # [T, groups · GROUP]
    routes_ptr,  # a byte per prob, in the layout of probs; read if MASKED
    token_of_ptr,  # int32 [R]
    pair_of_ptr,  # int64 [R]
    rows_ptr,  # [R, H]
    row_probs_ptr,  # [R, GROUP]
    state_stride,
    prob_stride,  # of probs and routes
    row_stride,
    row_prob_stride,
    width,
    groups,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    UNROUTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_of_ptr + row).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    tl.store(rows_ptr + row * row_stride + column, tl.load(states_ptr + token * state_stride + column, mask=inside), mask=inside)
    if tl.program_id(1) == 0:
        nth = tl.arange(0, GROUP_BLOCK)
        inside_group = nth < GROUP
        source = token * prob_stride + (tl.load(pair_of_ptr + row) % groups) * GROUP + nth
        probs = tl.load(probs_ptr + source, mask=inside_group, other=0.0)
        if MASKED:
            probs = tl.where(tl.load(routes_ptr + source, mask=inside_group, other=0) != 0, probs, UNROUTED)
        tl.store(row_probs_ptr + row * row_prob_stride + nth, probs, mask=inside_group)


@triton.jit
@no_type_check
def sum_kernel(
    rows_ptr,  # [R, H]
    row_probs_ptr,  # [R, GROUP]
    row_of_ptr,  # int32 [T, K], -1 for no row
    pair_of_ptr,  # int64 [R]
    states_ptr,  # [T, H]
    probs_ptr,  # [T, groups · GROUP]
    row_stride,
    row_prob_stride,
    state_stride,
    prob_stride,
    width,
    groups,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    PROBS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = sum_rows_of_token(rows_ptr, row_stride, row_of_ptr, token, column, inside, K, BLOCK)
    tl.store(states_ptr + token * state_stride + column, total.to(states_ptr.dtype.element_ty), mask=inside)
    if tl.program_id(1) == 0:
        prob = tl.arange(0, PROBS)
        row_of_prob = tl.full((PROBS,), -1, tl.int64)
        for nth in tl.static_range(K):
            row = tl.load(row_of_ptr + token * K + nth).to(tl.int64)
            group = tl.load(pair_of_ptr + row, mask=row >= 0, other=-1) % groups
            row_of_prob = tl.where((prob // GROUP == group) & (row >= 0), row, row_of_prob)
        source = row_probs_ptr + row_of_prob * row_prob_stride + prob % GROUP
        inside_probs = prob < groups * GROUP
        probs = tl.load(source, mask=inside_probs & (row_of_prob >= 0), other=0.0)
        tl.store(probs_ptr + token * prob_stride + prob, probs, mask=inside_probs)


def gather_triton(
    states: Tensor, probs: Tensor, routes: Tensor | None, order: ExpertOrder, rows: Tensor, row_probs: Tensor, *, group: int
) -> None:
    with on_device_of(states):
        launcher(gather_kernel, (len(rows), triton.cdiv(rows.shape[1], BLOCK_COLUMNS)))(
            states, probs, probs if routes is None else routes.view(torch.uint8), order.token_of, order.pair_of, rows, row_probs,
            states.stride(0), probs.stride(0), rows.stride(0), row_probs.stride(0), rows.shape[1], probs.shape[1] // group,
            GROUP=group, GROUP_BLOCK=triton.next_power_of_2(group), MASKED=routes is not None, UNROUTED=UNROUTED, BLOCK=BLOCK_COLUMNS,
        )  # fmt: skip


def sum_triton(rows: Tensor, row_probs: Tensor, order: ExpertOrder, states: Tensor, probs: Tensor, *, group: int) -> None:
    with on_device_of(rows):
        launcher(sum_kernel, (len(states), triton.cdiv(states.shape[1], BLOCK_COLUMNS)))(
            rows, row_probs, order.row_of, order.pair_of, states, probs,
            rows.stride(0), row_probs.stride(0), states.stride(0), probs.stride(0), states.shape[1], probs.shape[1] // group,
            K=order.row_of.shape[1], GROUP=group, PROBS=triton.next_power_of_2(probs.shape[1]), BLOCK=BLOCK_COLUMNS,
        )  # fmt: skip
