# mypy: disallow-untyped-defs=False
# (what is inside a Triton kernel has no Python types)
"""Triton kernels of the root-mean-square norm and its gradients.

Shape legend: R rows, n columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpctl.kernels.triton_backend import on_device_of

PROGRAMS = 528
"""Programs of the backward pass, each of which takes every so many-th row: four for each multiprocessor of an H100 or H200."""


@triton.jit
def norm(
    x_ptr,  # [R, n]
    weight_ptr,  # [n]
    out_ptr,  # [R, n]
    width,
    eps,
    offset,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32) + offset
    out = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * weight
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def norm_back(
    grad_ptr,  # [R, n]
    x_ptr,  # [R, n]
    weight_ptr,  # [n]
    x_grad_ptr,  # [R, n]
    weight_grads_ptr,  # fp32 [programs, n]
    rows,
    width,
    eps,
    offset,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32) + offset
    of_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    first = tl.program_id(0)
    for turn in range(0, tl.cdiv(rows - first, tl.num_programs(0))):
        place = (first.to(tl.int64) + turn * tl.num_programs(0)) * width + column
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
        x = x * scale
        of_weight += grad * x
        grad = grad * weight
        grad = (grad - x * (tl.sum(grad * x, 0) / width)) * scale
        tl.store(x_grad_ptr + place, grad.to(x_grad_ptr.dtype.element_ty), mask=inside)
    tl.store(weight_grads_ptr + tl.program_id(0) * width + column, of_weight, mask=inside)


def normed(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """x / rms(x) · (offset + weight) of contiguous x [..., n]."""
    out, width = torch.empty_like(x), len(weight)
    if x.numel():
        with on_device_of(x):
            norm[(x.numel() // width,)](x, weight, out, width, eps, offset, **_shape(width))
    return out


def gradients(grad: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight."""
    x_grad, width = torch.empty_like(x), len(weight)
    rows = x.numel() // width
    programs = min(rows, PROGRAMS)
    of_weights = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    if rows:
        with on_device_of(x):
            norm_back[(programs,)](grad.contiguous(), x, weight, x_grad, of_weights, rows, width, eps, offset, **_shape(width))
    return x_grad, of_weights.sum(0).to(weight.dtype)


def _shape(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}
