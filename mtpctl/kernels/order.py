"""The order in which rows of tokens are sorted by expert, a row for each token at each of its experts.

Ranks follow each other, and within a rank the last expert comes first, as its weights lie (`mtpctl.model.experts`). On a card three
kernels make it; nothing waits for the card.

Shape legend: T tokens, k experts a token, E experts in all, R = T k rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """row_of [T, k]: where a token's rows are; token_of and expert_of [R]: whose a row is, and at which expert; counts [E]: each expert's
    rows, in the order. All int32."""

    row_of: Tensor
    token_of: Tensor
    expert_of: Tensor
    counts: Tensor


def expert_order(routes: Tensor, k: int, ranks: int) -> ExpertOrder:
    """routes [T, E] bool, k of them set for each token; `ranks` share the experts evenly."""
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
    return ExpertOrder(row_of, token_of.to(torch.int32), backwards[column_of], counts)
