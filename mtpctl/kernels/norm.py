"""Root-mean-square norms (arXiv 1910.07467) over the last dimension.

    rms_norm(x, w)          x / rms(x) · (offset + w)     rms(x) = sqrt(mean x² + eps)
    gated_rms_norm(x, z, w) x / rms(x) · w · silu(z)

The offset is 1 in model families that store weights centered at 0. PyTorch's norm has no offset, so on CUDA these families use the Triton
kernels below. If flash-linear-attention is installed, it computes gated norms of at most `FLA_COLUMNS` columns.

Shape legend: R rows, n columns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpctl.kernels.triton_support import launcher, on_device_of, tl, triton

FLA_COLUMNS = 256
"""Maximum number of columns for flash-linear-attention's gated norm."""
BACKWARD_PROGRAMS = 528
"""Maximum number of programs of the backward kernel, which stride over the rows: four per SM of an H100 or H200."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / rms(x) · (offset + weight), in the shape and dtype of x [..., n]; weight [n]."""
    if x.is_cuda and offset:
        return _RmsNorm.apply(x, weight, eps, offset)
    if offset and x.dtype in (torch.bfloat16, torch.float16):  # in half precision, 1 + weight would lose most digits of a small weight
        return F.rms_norm(x.float(), (len(weight),), weight.float() + offset, eps).to(x.dtype)
    return F.rms_norm(x, (len(weight),), weight + offset if offset else weight, eps)


def rms_norm_by_row(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """`rms_norm` on CUDA by the Triton kernel, whose programs sum one row each, in an order that depends on n only."""
    return _RmsNorm.apply(x, weight, eps, offset)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight · silu(gate), in the shape and dtype of x [..., n]; gate [..., n], weight [n]."""
    # flash-linear-attention's kernel cannot be launched without rows.
    if x.is_cuda and x.shape[-1] <= FLA_COLUMNS and x.numel() > 0 and (fla_norm := _fla_gated_norm()) is not None:
        return fla_norm(x, gate, weight, None, eps=eps)
    return (F.rms_norm(x, (len(weight),), weight, eps) * F.silu(gate.float())).to(x.dtype)


@cache
def _fla_gated_norm() -> Callable[..., Tensor] | None:
    """flash-linear-attention's gated norm, if the package is installed.

    Imported at the first norm, because the import takes seconds and initializes CUDA, after which a process must not be forked. Engine
    cores import this module and then fork their workers.
    """
    try:
        from fla.modules.norm.fused_norm_gate import rms_norm_gated
    except ImportError:
        return None
    return rms_norm_gated


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.constants = eps, offset
        return rms_norm_triton(x, weight, eps, offset)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        return *rms_norm_backward_triton(grads[0], x, weight, *ctx.constants), None, None


@triton.jit
@no_type_check
def rms_norm_kernel(
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
@no_type_check
def rms_norm_backward_kernel(
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
    weight_grad = tl.zeros((BLOCK,), dtype=tl.float32)
    first = tl.program_id(0)
    for step in range(0, tl.cdiv(rows - first, tl.num_programs(0))):
        index = (first.to(tl.int64) + step * tl.num_programs(0)) * width + column
        x = tl.load(x_ptr + index, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + index, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
        x = x * scale
        weight_grad += grad * x
        grad = grad * weight
        grad = (grad - x * (tl.sum(grad * x, 0) / width)) * scale
        tl.store(x_grad_ptr + index, grad.to(x_grad_ptr.dtype.element_ty), mask=inside)
    tl.store(weight_grads_ptr + tl.program_id(0) * width + column, weight_grad, mask=inside)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """`rms_norm` of contiguous x."""
    out, width = torch.empty_like(x), len(weight)
    if x.numel():
        with on_device_of(x):
            launcher(rms_norm_kernel, (x.numel() // width,))(x, weight, out, width, eps, offset, **_launch_options(width))
    return out


def rms_norm_backward_triton(grad: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    x_grad, width = torch.empty_like(x), len(weight)
    rows = x.numel() // width
    programs = min(rows, BACKWARD_PROGRAMS)
    weight_grads = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    if rows:
        with on_device_of(x):
            launcher(rms_norm_backward_kernel, (programs,))(
                grad.contiguous(), x, weight, x_grad, weight_grads, rows, width, eps, offset, **_launch_options(width)
            )
    return x_grad, weight_grads.sum(0).to(weight.dtype)


def _launch_options(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}
