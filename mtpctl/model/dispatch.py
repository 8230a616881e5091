"""The way of tokens to their experts and back.

    tokens [T, H] ──Gather──► rows [T k, H], sorted by expert ──exchange──► the rows of this rank's experts
    tokens [T, H] ◄──Sum───── rows [T k, H] ◄──────────────── exchange ──── their outputs

A rank's experts come last expert first, as `Experts` wants them. `exchange` is there with expert parallelism alone; it needs to know on
the host how many rows travel, and is the only place where the host waits. While rows travel, a rank can compute something else.

Shape legend: T tokens, k experts a token, E experts in all, L experts a rank, P expert-parallel ranks, R rows, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mtpctl.kernels.autograd import AutogradContext
from mtpctl.kernels.grouped import row_sums
from mtpctl.kernels.order import ExpertOrder
from mtpctl.kernels.rows import distinct_rows


@dataclass(frozen=True, slots=True)
class Order:
    """An order of rows: `row_of` [T, k] is where a token's rows are, `token_of` [R] whose a row is. Both int32."""

    row_of: Tensor
    token_of: Tensor

    def gather(self, tokens: Tensor) -> Tensor:
        """tokens [T, H] → rows [R, H]: each row is a copy of its token, whose gradient is the sum of its rows'."""
        rows: Tensor = _Gather.apply(tokens, self.token_of, self.row_of)
        return rows

    def sum(self, rows: Tensor) -> Tensor:
        """rows [R, H] → tokens [T, H]: the sum of each token's rows, added up in fp32."""
        tokens: Tensor = _Sum.apply(rows, self.token_of, self.row_of)
        return tokens


def shares_of_rows(shares: Tensor, order: ExpertOrder) -> Tensor:
    """The share [R] of each row in the sum of its token, from shares [T, E] by token and expert."""
    return distinct_rows(shares.flatten(), order.pair_of)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Rows between expert-parallel ranks: `sent` and `received` rows by rank, and the order by expert of those that are received.

    counts [E]: the received rows of each of this rank's experts. even_share: the rows of all ranks over the number of ranks, rounded up.
    """

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]
    order: Order
    counts: Tensor
    even_share: int

    @classmethod
    def plan(cls, counts: Tensor, group: dist.ProcessGroup) -> Exchange:
        """Ask all ranks how many rows they send. counts [E]: this rank's rows for each expert, ordered as they are sent."""
        ranks = group.size()
        mine = counts.to(torch.int64)
        everyone = mine.new_empty(ranks * len(mine))
        dist.all_gather_into_tensor(everyone, mine, group=group)
        theirs = everyone.view(ranks, ranks, -1)[:, group.rank()]
        told: list[int] = torch.cat([mine.view(ranks, -1).sum(1), theirs.sum(1), everyone.sum().view(1)]).tolist()
        sent, received, rows = told[:ranks], told[ranks:-1], told[-1]
        # Rows come by rank, and by expert within a rank.
        local = torch.arange(theirs.shape[1], device=counts.device).repeat(ranks)
        expert_of = local.repeat_interleave(theirs.flatten(), output_size=sum(received))
        token_of = expert_of.argsort(stable=True)
        row_of = torch.empty_like(token_of).scatter_(0, token_of, torch.arange(len(token_of), device=counts.device))
        order = Order(row_of[:, None].to(torch.int32), token_of.to(torch.int32))
        return cls(group, sent, received, order, theirs.sum(0), -(-rows // ranks))

    def forth(self, rows: Tensor) -> Travel:
        """This rank's rows [T k, …] → the rows that its experts get, by rank."""
        return Travel(rows, self.sent, self.received, self.group)

    def back(self, rows: Tensor) -> Travel:
        """The experts' outputs, by rank → those of this rank's rows."""
        return Travel(rows, self.received, self.sent, self.group)


class Travel:
    """Rows on their way between ranks: they leave when this is made, `sent` rows to each rank, and `arrived` waits for those that come.

    What is computed in between runs while the rows travel. So do its gradients while those of the rows travel back, since autograd runs
    operations in the reverse of the order in which they were called.
    """

    def __init__(self, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> None:
        self._sent, self._received, self._group = sent, received, group
        self._coming: tuple[Tensor, dist.Work] | None = None
        self._left: Tensor | None = _Departed.apply(rows, self)

    def arrived(self) -> Tensor:
        """The rows, once they are there. To be called once."""
        rows: Tensor = _Arrived.apply(self._left, self)
        self._left = None
        return rows

    def start(self, rows: Tensor, *, back: bool = False) -> None:
        """Send rows, or gradients the other way. What comes is what `wait` returns."""
        sent, received = (self._received, self._sent) if back else (self._sent, self._received)
        coming = rows.new_empty(sum(received), *rows.shape[1:])
        self._coming = coming, dist.all_to_all_single(coming, rows.contiguous(), received, sent, group=self._group, async_op=True)

    def wait(self) -> Tensor:
        """What `start` asked for, once it is there."""
        assert self._coming is not None, "rows arrive once, after they left"
        (coming, work), self._coming = self._coming, None
        work.wait()
        return coming


class _TravelContext(AutogradContext, Protocol):
    travel: Travel
    left: torch.Size


class _Departed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _TravelContext, rows: Tensor, travel: Travel) -> Tensor:
        ctx.travel = travel
        travel.start(rows)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: _TravelContext, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.travel.wait(), None


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _TravelContext, left: Tensor, travel: Travel) -> Tensor:
        ctx.travel, ctx.left = travel, left.shape
        return travel.wait()

    @staticmethod
    def backward(ctx: _TravelContext, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.travel.start(grads[0], back=True)
        # A placeholder of the right shape: the gradient itself is on its way, and `_Departed.backward` waits for it.
        return grads[0].new_zeros(()).expand(ctx.left), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, tokens: Tensor, token_of: Tensor, row_of: Tensor) -> Tensor:
        ctx.save_for_backward(row_of)
        return tokens.index_select(0, token_of)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor, None, None]:
        (row_of,) = ctx.saved_tensors
        return row_sums(grads[0].contiguous(), row_of), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, rows: Tensor, token_of: Tensor, row_of: Tensor) -> Tensor:
        ctx.save_for_backward(token_of)
        return row_sums(rows, row_of)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor, None, None]:
        (token_of,) = ctx.saved_tensors
        return grads[0].index_select(0, token_of), None, None
