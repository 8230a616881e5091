"""Scales heads for the scan of Mamba-2: multiplies its input by the step size, and adds the scaled input (the skip) to its output.

On CUDA, one Triton kernel computes the result and another the gradients, in fp32 with one rounding. Plain PyTorch stores fp32 copies.

Shape legend: T tokens, D head dim.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
from torch import Tensor

from mtpctl.kernels.triton_support import on_device_of, tl, triton

ROWS = 32
"""Rows that a program processes; a row is one head of one token."""


def scale_heads(x: Tensor, scale: Tensor, base: Tensor | None = None) -> Tensor:
    """x · scale, or base + x · scale, [T, heads, D] in the dtype of x.

    x [T, heads, D]; scale [T, heads], or [heads] for all tokens; base [T, heads, D]. All are differentiable.
    """
    return _ScaledHeads.apply(x, scale, base)


class _ScaledHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, base: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.has_base = base is not None
        return scale_heads_triton(x, scale, base) if x.is_cuda else scale_heads_torch(x, scale, base)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, scale = ctx.saved_tensors
        x_grad, sums = (scale_heads_backward_triton if x.is_cuda else scale_heads_backward_torch)(grads[0], x, scale)
        scale_grad = sums if scale.dim() == 2 else sums.sum(0)
        return x_grad, scale_grad.to(scale.dtype), grads[0] if ctx.has_base else None


def scale_heads_torch(x: Tensor, scale: Tensor, base: Tensor | None) -> Tensor:
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    product = x.to(compute_dtype) * scale.to(compute_dtype)[..., None]
    return (product if base is None else base.to(compute_dtype) + product).to(x.dtype)


def scale_heads_backward_torch(grad: Tensor, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of x, and for each head of each token the sum of grad · x."""
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    grad = grad.to(compute_dtype)
    return (grad * scale.to(compute_dtype)[..., None]).to(x.dtype), (grad * x.to(compute_dtype)).sum(-1)


@triton.jit
@no_type_check
def _tile(x_ptr, scale_ptr, rows, heads, width, x_stride, SHARED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows and offsets of a program's heads, their mask, and x and scale in fp32."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = row % heads
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    x = tl.load(x_ptr + ((row // heads) * x_stride + head * width)[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + (head if SHARED else row), mask=row < rows, other=0.0).to(tl.float32)
    return row, row[:, None] * width + column[None, :], inside, x, scale


@triton.jit
@no_type_check
def scaled_kernel(
    x_ptr,  # [T, heads, D], a token every x_stride elements
    scale_ptr,  # [T, heads], or [heads] if SHARED
    base_ptr,  # [T, heads, D], read if ADDED
    out_ptr,  # [T, heads, D]
    rows,
    heads,
    width,
    x_stride,
    SHARED: tl.constexpr,
    ADDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    _row, offset, inside, x, scale = _tile(x_ptr, scale_ptr, rows, heads, width, x_stride, SHARED, ROWS, BLOCK)
    product = x * scale[:, None]
    if ADDED:
        product += tl.load(base_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + offset, product.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def scaled_backward_kernel(
    grad_ptr,  # [T, heads, D]
    x_ptr,  # [T, heads, D], a token every x_stride elements
    scale_ptr,  # [T, heads], or [heads] if SHARED
    x_grad_ptr,  # [T, heads, D]
    sums_ptr,  # [T, heads]
    rows,
    heads,
    width,
    x_stride,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, offset, inside, x, scale = _tile(x_ptr, scale_ptr, rows, heads, width, x_stride, SHARED, ROWS, BLOCK)
    grad = tl.load(grad_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(x_grad_ptr + offset, (grad * scale[:, None]).to(x_grad_ptr.dtype.element_ty), mask=inside)
    tl.store(sums_ptr + row, tl.sum(grad * x, axis=1), mask=row < rows)


def scale_heads_triton(x: Tensor, scale: Tensor, base: Tensor | None) -> Tensor:
    x, sizes = _with_packed_heads(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        base_or_out = out if base is None else base.contiguous()  # the kernel does not read it if ADDED is false
        with on_device_of(x):
            scaled_kernel[_grid(sizes)](
                x, scale.contiguous(), base_or_out, out, *sizes, scale.dim() == 1, base is not None, ROWS, _block(x)
            )
    return out


def scale_heads_backward_triton(grad: Tensor, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    x, sizes = _with_packed_heads(x)
    x_grad, sums = torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty(x.shape[:2], dtype=torch.float32, device=x.device)
    if x.numel():
        with on_device_of(x):
            scaled_backward_kernel[_grid(sizes)](
                grad.contiguous(), x, scale.contiguous(), x_grad, sums, *sizes, scale.dim() == 1, ROWS, _block(x)
            )
    return x_grad, sums


def _with_packed_heads(x: Tensor) -> tuple[Tensor, tuple[int, int, int, int]]:
    """x with contiguous heads, and its numbers of rows and heads, head dim and token stride. A view of some channels is not copied."""
    tokens, heads, width = x.shape
    if x.stride()[1:] != (width, 1):
        x = x.contiguous()
    return x, (tokens * heads, heads, width, x.stride(0))


def _grid(sizes: tuple[int, int, int, int]) -> tuple[int]:
    return (triton.cdiv(sizes[0], ROWS),)


def _block(x: Tensor) -> int:
    return triton.next_power_of_2(x.shape[-1])
