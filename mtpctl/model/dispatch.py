"""The way of tokens to their experts and back.

    tokens [T, H] ──Gather──► rows [T k, H], sorted by expert ──exchange──► the rows of this rank's experts
    tokens [T, H] ◄──Sum───── rows [T k, H] ◄──────────────── exchange ──── their outputs

A rank's experts come last expert first, as `Experts` wants them. `exchange` is there with expert parallelism alone; it needs to know on
the host how many rows travel, and is the only place where the host waits.

Shape legend: T tokens, k experts a token, E experts in all, L experts a rank, P expert-parallel ranks, R rows, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all
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
    """Rows between expert-parallel ranks: `sent` and `received` rows by rank, and the order by expert of those that are received."""

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]
    order: Order
    counts: Tensor

    @classmethod
    def plan(cls, counts: Tensor, group: dist.ProcessGroup) -> Exchange:
        """Ask all ranks how many rows they send. counts [E]: this rank's rows for each expert, ordered as they are sent."""
        ranks = group.size()
        mine = counts.view(ranks, -1).to(torch.int64)
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine.contiguous(), group=group)
        sent, received = torch.stack([mine.sum(1), theirs.sum(1)]).tolist()
        # Rows come by rank, and by expert within a rank.
        local = torch.arange(mine.shape[1], device=counts.device).repeat(ranks)
        expert_of = local.repeat_interleave(theirs.flatten(), output_size=sum(received))
        token_of = expert_of.argsort(stable=True)
        row_of = torch.empty_like(token_of).scatter_(0, token_of, torch.arange(len(token_of), device=counts.device))
        return cls(group, sent, received, Order(row_of[:, None].to(torch.int32), token_of.to(torch.int32)), theirs.sum(0))

    def forth(self, rows: Tensor) -> Tensor:
        """This rank's rows [T k, …] → the rows that its experts get, by rank."""
        found: Tensor = all_to_all(self.group, rows, self.received, self.sent)
        return found

    def back(self, rows: Tensor) -> Tensor:
        """The experts' outputs, by rank → those of this rank's rows."""
        found: Tensor = all_to_all(self.group, rows, self.sent, self.received)
        return found


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
