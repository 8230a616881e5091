# mypy: disallow-untyped-defs=False
# (what is inside a Triton kernel has no Python types)
"""Triton kernels of SwiGLU and its gradients; a program takes one row.

Shape legend: R rows, F columns of gate and of up each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpctl.kernels.triton_backend import on_device_of

COLUMNS = 1024
"""Columns of a row that a program takes at a time, at most."""


@triton.jit
def _gate_and_up(gate_up_ptr, row, start, width, BLOCK: tl.constexpr):
    """A block of a row's columns, which of them there are, and their gate and up in fp32."""
    column = start + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up_ptr + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    return column, inside, gate, up


@triton.jit
def swiglu(
    gate_up_ptr,  # [R, 2 F]
    scale_ptr,  # [R], read where SCALED
    out_ptr,  # [R, F]
    width,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scale = 1.0
    if SCALED:
        scale = tl.load(scale_ptr + row).to(tl.float32)
    for start in range(0, width, BLOCK):
        column, inside, gate, up = _gate_and_up(gate_up_ptr, row, start, width, BLOCK)
        product = gate * tl.sigmoid(gate) * up * scale
        tl.store(out_ptr + row * width + column, product.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward(
    grad_ptr,  # [R, F]
    gate_up_ptr,  # [R, 2 F]
    scale_ptr,  # [R], read where SCALED
    gate_up_grad_ptr,  # [R, 2 F]
    scale_grad_ptr,  # [R], written where SCALED
    width,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scale = 1.0
    if SCALED:
        scale = tl.load(scale_ptr + row).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        column, inside, gate, up = _gate_and_up(gate_up_ptr, row, start, width, BLOCK)
        grad = tl.load(grad_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        if SCALED:
            total += grad * gate * sigmoid * up
        grad *= scale
        gate_grad = grad * up * (sigmoid * (1 + gate * (1 - sigmoid)))
        tl.store(gate_up_grad_ptr + row * 2 * width + column, gate_grad.to(gate_up_grad_ptr.dtype.element_ty), mask=inside)
        up_grad = grad * gate * sigmoid
        tl.store(gate_up_grad_ptr + row * 2 * width + width + column, up_grad.to(gate_up_grad_ptr.dtype.element_ty), mask=inside)
    if SCALED:
        tl.store(scale_grad_ptr + row, tl.sum(total).to(scale_grad_ptr.dtype.element_ty))


def product(gate_up: Tensor, scale: Tensor | None) -> Tensor:
    """silu(gate) · up · scale [..., F], from gate_up [..., 2 F] and scale [...], or None for 1."""
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    if out.numel():
        scales = gate_up if scale is None else scale.contiguous()
        with on_device_of(gate_up):
            swiglu[(out.numel() // width,)](gate_up, scales, out, width, SCALED=scale is not None, BLOCK=_block(width))
    return out


def gradients(grad: Tensor, gate_up: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The gradients of gate_up and of scale (None where there is no scale), from `grad` [..., F], the gradient of the product."""
    gate_up, grad = gate_up.contiguous(), grad.contiguous()
    width = grad.shape[-1]
    gate_up_grad = torch.empty_like(gate_up)
    scale_grad = None if scale is None else torch.empty_like(scale, memory_format=torch.contiguous_format)
    if grad.numel():
        scales, scale_grads = (gate_up, gate_up) if scale is None else (scale.contiguous(), scale_grad)
        with on_device_of(gate_up):
            swiglu_backward[(grad.numel() // width,)](
                grad, gate_up, scales, gate_up_grad, scale_grads, width, SCALED=scale is not None, BLOCK=_block(width)
            )
    return gate_up_grad, scale_grad


def _block(width: int) -> int:
    return min(triton.next_power_of_2(width), COLUMNS)
