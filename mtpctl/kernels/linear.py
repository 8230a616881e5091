"""A linear layer whose weight's gradient goes straight into the fp32 buffer, `main_grad`, and never through autograd."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from mtpctl.kernels.autograd import AutogradContext
from mtpctl.kernels.main_grad import accumulate_weight_grad


def buffered_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in] · weightᵀ → [..., out], with a weight [out, in] that `is_buffered`."""
    out: Tensor = _BufferedLinear.apply(x, weight)
    return out


class _Context(AutogradContext, Protocol):
    weight: Tensor


class _BufferedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight  # a parameter, which lives longer than the graph
        return torch.mm(x.flatten(0, -2), weight.t()).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, None]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        grad = grads[0].flatten(0, -2)
        of_x = (grad @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        buffer: Tensor = weight.main_grad  # type: ignore[attr-defined]
        accumulate_weight_grad(buffer, grad, x.flatten(0, -2))
        return of_x, None
