"""MoE token dispatch: copies tokens to the rows of their experts, exchanges rows over expert-parallel ranks, and sums the outputs.

    tokens [T, H] ──Gather──► rows [T k, H], sorted by expert ──exchange──► the rows of this rank's experts
    tokens [T, H] ◄──Sum───── rows [T k, H] ◄──────────────── exchange ──── their outputs

A rank's experts are ordered last expert first (see `Experts`). Only expert parallelism has the exchange. It needs the number of rows per
rank on the host, which is the only synchronization here. While rows are in flight, a rank can compute something else.

Shape legend: T tokens, k experts per token, E experts in total, R rows, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mtpctl.kernels.rows import ExpertOrder, distinct_rows, row_sums


@dataclass(frozen=True, slots=True)
class Order:
    """Mapping between tokens and rows, int32. row_of [T, k]: the rows of each token. token_of [R]: the token of each row."""

    row_of: Tensor
    token_of: Tensor

    def gather(self, tokens: Tensor) -> Tensor:
        """tokens [T, H] → rows [R, H]. A token's gradient is the sum of its rows' gradients."""
        return _Gather.apply(tokens, self.token_of, self.row_of)

    def sum(self, rows: Tensor) -> Tensor:
        """rows [R, H] → tokens [T, H]: the sum of each token's rows, accumulated in fp32."""
        return _Sum.apply(rows, self.token_of, self.row_of)


def probs_of_rows(probs: Tensor, order: ExpertOrder) -> Tensor:
    """The prob [R] of each row from probs [T, E]."""
    return distinct_rows(probs.flatten(), order.pair_of)


@dataclass(frozen=True, slots=True)
class Exchange:
    """All-to-all of rows between expert-parallel ranks.

    sent, received: number of rows per rank. order: sorts the received rows by expert. counts [E / ranks]: received rows of each of this
    rank's experts. even_share: mean number of rows per rank, rounded up.
    """

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]
    order: Order
    counts: Tensor
    even_share: int

    @classmethod
    def plan(cls, counts: Tensor, group: dist.ProcessGroup) -> Exchange:
        """Gather the row counts of all ranks. counts [E]: this rank's rows for each expert, in the order in which they are sent."""
        ranks = group.size()
        own = counts.to(torch.int64)
        gathered = own.new_empty(ranks * len(own))
        dist.all_gather_into_tensor(gathered, own, group=group)
        incoming = gathered.view(ranks, ranks, -1)[:, group.rank()]
        sizes: list[int] = torch.cat([own.view(ranks, -1).sum(1), incoming.sum(1), gathered.sum().view(1)]).tolist()
        sent, received, rows = sizes[:ranks], sizes[ranks:-1], sizes[-1]
        # Rows arrive sorted by rank, and by expert within a rank.
        local = torch.arange(incoming.shape[1], device=counts.device).repeat(ranks)
        expert_of = local.repeat_interleave(incoming.flatten(), output_size=sum(received))
        token_of = expert_of.argsort(stable=True)
        row_of = torch.empty_like(token_of).scatter_(0, token_of, torch.arange(len(token_of), device=counts.device))
        order = Order(row_of[:, None].to(torch.int32), token_of.to(torch.int32))
        return cls(group, sent, received, order, incoming.sum(0), -(-rows // ranks))

    def dispatch(self, rows: Tensor) -> AsyncAllToAll:
        """Send this rank's rows [T k, …] and receive the rows of its experts, sorted by source rank."""
        return AsyncAllToAll(rows, self.sent, self.received, self.group)

    def combine(self, rows: Tensor) -> AsyncAllToAll:
        """Send the experts' outputs back, sorted by source rank, and receive the outputs of this rank's rows."""
        return AsyncAllToAll(rows, self.received, self.sent, self.group)


class AsyncAllToAll:
    """A differentiable all-to-all that starts when constructed; `wait` returns the received rows.

    Computation between construction and `wait` overlaps with the communication. In the backward pass it overlaps as well, because autograd
    runs operations in reverse order.
    """

    def __init__(self, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> None:
        self._sent, self._received, self._group = sent, received, group
        self._in_flight: tuple[Tensor, dist.Work] | None = None
        self._sent_rows: Tensor | None = _Start.apply(rows, self)

    def wait(self) -> Tensor:
        """Return the received rows. May be called once."""
        rows: Tensor = _Wait.apply(self._sent_rows, self)
        self._sent_rows = None
        return rows

    def start_transfer(self, rows: Tensor, *, backward: bool = False) -> None:
        """Start sending rows, or gradients in the opposite direction."""
        sent, received = (self._received, self._sent) if backward else (self._sent, self._received)
        out = rows.new_empty(sum(received), *rows.shape[1:])
        self._in_flight = out, dist.all_to_all_single(out, rows.contiguous(), received, sent, group=self._group, async_op=True)

    def finish_transfer(self) -> Tensor:
        """Wait for the result of `start_transfer`."""
        assert self._in_flight is not None, "wait() may be called once"
        (out, work), self._in_flight = self._in_flight, None
        work.wait()
        return out


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: AsyncAllToAll) -> Tensor:
        ctx.exchange = exchange
        exchange.start_transfer(rows)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.finish_transfer(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent_rows: Tensor, exchange: AsyncAllToAll) -> Tensor:
        ctx.exchange, ctx.shape = exchange, sent_rows.shape
        return exchange.finish_transfer()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.start_transfer(grads[0], backward=True)
        # A placeholder of the right shape. The gradient is in flight; `_Start.backward` waits for it.
        return grads[0].new_zeros(()).expand(ctx.shape), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, token_of: Tensor, row_of: Tensor) -> Tensor:
        ctx.save_for_backward(row_of)
        return tokens.index_select(0, token_of)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (row_of,) = ctx.saved_tensors
        return row_sums(grads[0].contiguous(), row_of), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, token_of: Tensor, row_of: Tensor) -> Tensor:
        ctx.save_for_backward(token_of)
        return row_sums(rows, row_of)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (token_of,) = ctx.saved_tensors
        return grads[0].index_select(0, token_of), None, None
