"""MoE token dispatch: copies tokens to the rows of their experts, exchanges tokens over expert-parallel ranks, and sums the outputs.

    tokens [T, H] ──gather──► copies, one per rank ──exchange──► tokens of this rank's experts ──gather──► rows, sorted by expert
    tokens [T, H] ◄──sum───── partial outputs ◄──── exchange ─── sums over this rank's experts ◄──sum───── outputs of the experts

Only expert parallelism has the exchange and the outer gather and sum. A token travels once to each rank that has one of its experts, not
once per expert. The exchange needs the number of copies and rows per rank on the host, which is the only synchronization here. While
copies are in flight, a rank can compute something else.

Shape legend: T tokens, k experts per token, E experts in total, R rows, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mtpctl.kernels.rows import ExpertOrder, distinct_rows, expert_order, row_sums


def gather(tokens: Tensor, order: ExpertOrder) -> Tensor:
    """tokens [T, H] → rows [R, H]. A token's gradient is the sum of its rows' gradients."""
    rows: Tensor = _Gather.apply(tokens, order.token_of, order.row_of)
    return rows


def sum_rows(rows: Tensor, order: ExpertOrder) -> Tensor:
    """rows [R, H] → tokens [T, H]: the sum of each token's rows, accumulated in fp32."""
    sums: Tensor = _Sum.apply(rows, order.token_of, order.row_of)
    return sums


def probs_of_rows(probs: Tensor, order: ExpertOrder) -> Tensor:
    """The prob [R] of each row from probs [T, E]."""
    return distinct_rows(probs.flatten(), order.pair_of)


@dataclass(frozen=True, slots=True)
class Exchange:
    """All-to-all of tokens between expert-parallel ranks.

    order: this rank's tokens by destination; its columns are ranks. sent, received: number of tokens per rank. rows: number of (token,
    expert) pairs of this rank's experts. even_share: mean number of rows per rank, rounded up.
    """

    group: dist.ProcessGroup
    order: ExpertOrder
    sent: list[int]
    received: list[int]
    rows: int
    even_share: int

    @classmethod
    def plan(cls, routes: Tensor, k: int, group: dist.ProcessGroup) -> Exchange:
        """Gather the counts of all ranks. routes [T, E]: mask of the k experts of each of this rank's tokens."""
        ranks, rank = group.size(), group.rank()
        experts_by_rank = routes.unflatten(1, (ranks, -1))
        destinations = experts_by_rank.any(2)
        own = torch.stack([destinations.sum(0), experts_by_rank.sum((0, 2))])
        gathered = own.new_empty(ranks * 2, ranks)
        gathering = dist.all_gather_into_tensor(gathered, own, group=group, async_op=True)
        # Before waiting for the counts, so that the GPU is not idle meanwhile. There are at most this many copies.
        order = expert_order(destinations, min(k, ranks), ranks, len(routes) * min(k, ranks))
        gathering.wait()
        tokens_to, rows_to = gathered.view(ranks, 2, ranks).transpose(0, 1).tolist()  # [source][destination]
        sent, received = tokens_to[rank], [row[rank] for row in tokens_to]
        copies = sum(sent)
        order = replace(order, token_of=order.token_of[:copies], pair_of=order.pair_of[:copies])
        return cls(group, order, sent, received, sum(row[rank] for row in rows_to), -(-sum(map(sum, rows_to)) // ranks))

    def dispatch(self, copies: Tensor) -> AsyncAllToAll:
        """Send this rank's copies, sorted by destination, and receive those of the other ranks, sorted by source."""
        return AsyncAllToAll(copies, self.sent, self.received, self.group)

    def combine(self, outputs: Tensor) -> AsyncAllToAll:
        """The reverse: send outputs for received copies, and receive those of this rank's copies."""
        return AsyncAllToAll(outputs, self.received, self.sent, self.group)


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
        # The gradient is in flight; `_Start.backward` waits for it, and does not read this placeholder, which has the right shape.
        return grads[0].new_empty(()).expand(ctx.shape), None


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
