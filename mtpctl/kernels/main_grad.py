"""Linear layers that write their weight gradient to Megatron's fp32 buffer `main_grad` instead of returning it to autograd.

Megatron adds the gradients of all microbatches to the buffer. Zeroing it before an update and reading the zeros back would take as much
memory traffic as the gradient of one more microbatch. Instead, the buffer is marked stale and the first gradient overwrites it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_buffered(weight: Tensor) -> bool:
    """Whether the weight is trained and has a gradient buffer."""
    return weight.requires_grad and getattr(weight, "main_grad", None) is not None


def mark_stale(buffer: Tensor) -> None:
    """Mark the start of an update: the next gradient overwrites `buffer`."""
    buffer.stale = True  # type: ignore[attr-defined]


def take_stale(buffer: Tensor) -> bool:
    """Whether the next gradient overwrites `buffer`. Clears the mark, so that later gradients are added."""
    stale: bool = getattr(buffer, "stale", False)
    if stale:
        buffer.stale = False  # type: ignore[attr-defined]
    return stale


def accumulate_weight_grad(buffer: Tensor, grad: Tensor, x: Tensor) -> None:
    """Write gradᵀ · x to the fp32 `buffer` [out, in], or add it if the buffer is not stale. grad [R, out], x [R, in].

    On CUDA, products of half-precision operands accumulate in fp32. On a CPU the product is rounded to half precision first.
    """
    stale = take_stale(buffer)
    if x.dtype == buffer.dtype:
        torch.mm(grad.t(), x, out=buffer) if stale else buffer.addmm_(grad.t(), x)
    elif not x.is_cuda:
        product = grad.t() @ x
        buffer.copy_(product) if stale else buffer.add_(product)
    elif stale:
        torch.mm(grad.t(), x, out_dtype=buffer.dtype, out=buffer)
    else:
        torch.addmm(buffer, grad.t(), x, out_dtype=buffer.dtype, out=buffer)


def buffered_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in] · weightᵀ → [..., out]. `weight` [out, in] must satisfy `is_buffered`."""
    return _BufferedLinear.apply(x, weight)


class _BufferedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight  # a parameter, which outlives the graph
        return torch.mm(x.flatten(0, -2), weight.t()).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return linear_backward(ctx, grads[0])


def linear_backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the inputs x [..., in] (the saved tensor) and `ctx.weight`, whose gradient goes to its buffer instead if it has one."""
    (x,), weight = ctx.saved_tensors, ctx.weight
    grad = out_grad.flatten(0, -2)
    x_grad = (grad @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
    if is_buffered(weight):
        accumulate_weight_grad(weight.main_grad, grad, x.flatten(0, -2))
        return x_grad, None
    return x_grad, grad.t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
