"""Rows of a tensor, none of them twice, so that their gradients go back to their places without being added up."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from mtpctl.kernels.autograd import AutogradContext


def distinct_rows(x: Tensor, places: Tensor) -> Tensor:
    """x [n, …] → its rows at `places` [r], integers of which no two are equal: [r, …].

    `x[places]` cannot know that, and sorts the places in its backward pass to add up the gradients of equal ones.
    """
    rows: Tensor = _DistinctRows.apply(x, places)
    return rows


class _Context(AutogradContext, Protocol):
    shape: torch.Size


class _DistinctRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.shape = x.shape
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.shape).index_copy_(0, places, grads[0]), None
