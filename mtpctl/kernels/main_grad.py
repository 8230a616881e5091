"""Gradient buffers whose first gradient of an update replaces what they hold.

Megatron gives each weight that trains an fp32 buffer, `main_grad`, to which the gradients of all micro-batches are added. Zeroing it first,
and reading the zeros back, would take as much memory traffic as a further micro-batch's gradient. So the buffer is marked in their place,
and whoever writes a gradient into it asks whether this is the first one.
"""

from __future__ import annotations

import torch
from torch import Tensor

ADDED_AT_ONCE = 1 << 25
"""Elements of the largest buffer to which a card's matrix product adds. Larger ones take longer that way than with a product of its own."""


def expect_first(buffer: Tensor) -> None:
    """An update begins: the next gradient replaces what `buffer` holds."""
    buffer.replaced_next = True  # type: ignore[attr-defined]


def takes_first(buffer: Tensor) -> bool:
    """Whether the gradient that comes now has to replace what `buffer` holds, rather than be added to it. Later ones are added."""
    first: bool = getattr(buffer, "replaced_next", False)
    if first:
        buffer.replaced_next = False  # type: ignore[attr-defined]
    return first


def add_outer_products(buffer: Tensor, grad: Tensor, x: Tensor) -> None:
    """Put the gradient of a linear layer's weight, grad [R, out] and x [R, in], into its `buffer` [out, in]: the first or one more."""
    replaces = takes_first(buffer)
    if x.dtype == buffer.dtype:
        torch.mm(grad.t(), x, out=buffer) if replaces else buffer.addmm_(grad.t(), x)
    elif x.is_cuda and replaces:
        torch.mm(grad.t(), x, out_dtype=buffer.dtype, out=buffer)
    elif x.is_cuda and buffer.numel() <= ADDED_AT_ONCE:
        torch.addmm(buffer, grad.t(), x, out_dtype=buffer.dtype, out=buffer)
    else:  # a CPU has no product of half-precision operands in fp32
        found = grad.t() @ x
        buffer.copy_(found) if replaces else buffer.add_(found)
