"""Gradient buffers that are stale at the start of an update: the first gradient replaces what they hold.

Megatron gives each weight that trains an fp32 buffer, `main_grad`, to which the gradients of all micro-batches are added. Zeroing it first,
and reading the zeros back, would take as much memory traffic as a further micro-batch's gradient. So the buffer is marked in their place,
and whoever writes a gradient into it asks whether it is stale.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_buffered(weight: Tensor) -> bool:
    """Whether the weight trains and has a buffer for its gradient."""
    return weight.requires_grad and getattr(weight, "main_grad", None) is not None


def mark_stale(buffer: Tensor) -> None:
    """An update begins: the next gradient replaces what `buffer` holds."""
    buffer.stale = True  # type: ignore[attr-defined]


def take_stale(buffer: Tensor) -> bool:
    """Whether the gradient that comes now has to replace what `buffer` holds, rather than be added to it. Later ones are added."""
    stale: bool = getattr(buffer, "stale", False)
    if stale:
        buffer.stale = False  # type: ignore[attr-defined]
    return stale


def accumulate_weight_grad(buffer: Tensor, grad: Tensor, x: Tensor) -> None:
    """Put the gradient of a linear layer's weight, grad [R, out] and x [R, in], into its fp32 `buffer` [out, in]: the first or one more.

    On a card products of half-precision operands accumulate in fp32. A CPU has none, and rounds a micro-batch's gradient to half precision.
    """
    stale = take_stale(buffer)
    if x.dtype == buffer.dtype:
        torch.mm(grad.t(), x, out=buffer) if stale else buffer.addmm_(grad.t(), x)
    elif not x.is_cuda:
        found = grad.t() @ x
        buffer.copy_(found) if stale else buffer.add_(found)
    elif stale:
        torch.mm(grad.t(), x, out_dtype=buffer.dtype, out=buffer)
    else:
        torch.addmm(buffer, grad.t(), x, out_dtype=buffer.dtype, out=buffer)
