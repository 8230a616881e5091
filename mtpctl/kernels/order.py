"""Sorts the rows of a mixture of experts by expert. A token has one row for each of its experts.

The rows of the first rank's experts come first, then those of the next rank. Within a rank the rows of the last expert come first, since
its weights lie first in memory (`mtpctl.model.experts`). On a card three kernels compute the order, and the host does not wait for them.

Shape legend: T tokens, k experts a token, E experts in all, R = T k rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """Where each token's rows are among the sorted rows.

    row_of [T, k]: the places of a token's rows. token_of [R]: the token of each row. pair_of [R] int64: its token and expert in one number,
    the place in a flattened [T, E]. counts [E]: the number of rows of each expert, in the order in which the rows are sorted. All but
    pair_of are int32.
    """

    row_of: Tensor
    token_of: Tensor
    pair_of: Tensor
    counts: Tensor


def expert_order(routes: Tensor, k: int, ranks: int) -> ExpertOrder:
    """The order of the rows that `routes` [T, E] asks for, a bool for each token and expert, of which each token has exactly k set.

    `ranks`: the expert-parallel ranks, each of which has E / ranks consecutive experts.
    """
    if routes.is_cuda:
        from mtpctl.kernels import order_triton

        return ExpertOrder(*order_triton.expert_order(routes, k, ranks))
    return plain_expert_order(routes, k, ranks)


def plain_expert_order(routes: Tensor, k: int, ranks: int) -> ExpertOrder:
    """`expert_order` in plain PyTorch."""
    tokens, total = routes.shape
    backwards = torch.arange(total, dtype=torch.int32, device=routes.device).view(ranks, -1).flip(1).flatten()
    column_of, token_of = routes.index_select(1, backwards).t().nonzero(as_tuple=True)
    row_of = token_of.argsort(stable=True).to(torch.int32).view(tokens, k)
    counts = column_of.bincount(minlength=total).to(torch.int32)
    return ExpertOrder(row_of, token_of.to(torch.int32), token_of * total + backwards[column_of], counts)
