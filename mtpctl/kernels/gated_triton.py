# mypy: disallow-untyped-defs=False
# (what is inside a Triton kernel has no Python types)
"""Triton kernels of the gated product and its gradients; a program takes one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpctl.kernels.triton_backend import on_device_of

COLUMNS = 1024
"""Columns of a row that a program takes at a time, at most."""


@triton.jit
def gated(
    both_ptr,  # [R, 2 F]
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
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        gate = tl.load(both_ptr + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(both_ptr + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
        product = gate * tl.sigmoid(gate) * up * scale
        tl.store(out_ptr + row * width + column, product.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gated_backward(
    grad_ptr,  # [R, F]
    both_ptr,  # [R, 2 F]
    scale_ptr,  # [R], read where SCALED
    both_grad_ptr,  # [R, 2 F]
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
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        gate = tl.load(both_ptr + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(both_ptr + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(gate)
        if SCALED:
            total += grad * gate * share * up
        grad *= scale
        gate_grad = grad * up * (share * (1 + gate * (1 - share)))
        tl.store(both_grad_ptr + row * 2 * width + column, gate_grad.to(both_grad_ptr.dtype.element_ty), mask=inside)
        up_grad = grad * gate * share
        tl.store(both_grad_ptr + row * 2 * width + width + column, up_grad.to(both_grad_ptr.dtype.element_ty), mask=inside)
    if SCALED:
        tl.store(scale_grad_ptr + row, tl.sum(total).to(scale_grad_ptr.dtype.element_ty))


def product(both: Tensor, scale: Tensor | None) -> Tensor:
    """both [..., 2 F], scale [...] or None → [..., F]."""
    both = both.contiguous()
    width = both.shape[-1] // 2
    out = both.new_empty(*both.shape[:-1], width)
    if out.numel():
        scales = both if scale is None else scale.contiguous()
        with on_device_of(both):
            gated[(out.numel() // width,)](both, scales, out, width, SCALED=scale is not None, BLOCK=_block(width))
    return out


def gradients(grad: Tensor, both: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The gradients of both and scale, from grad [..., F], that of the product."""
    both, grad = both.contiguous(), grad.contiguous()
    width = grad.shape[-1]
    both_grad = torch.empty_like(both)
    scale_grad = None if scale is None else torch.empty_like(scale, memory_format=torch.contiguous_format)
    if grad.numel():
        scales, scale_grads = (both, both) if scale is None else (scale.contiguous(), scale_grad)
        with on_device_of(both):
            gated_backward[(grad.numel() // width,)](
                grad, both, scales, both_grad, scale_grads, width, SCALED=scale is not None, BLOCK=_block(width)
            )
    return both_grad, scale_grad


def _block(width: int) -> int:
    return min(triton.next_power_of_2(width), COLUMNS)
