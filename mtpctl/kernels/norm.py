"""Root-mean-square norms (arXiv 1910.07467) over the last dimension:

    rms_norm(x, w)          x / rms(x) · (offset + w)     rms(x) = sqrt(mean x² + eps)
    gated_rms_norm(x, z, w) x / rms(x) · w · silu(z)

The offset is 1 in families whose weights are stored around 0; the sum is in fp32. PyTorch's norms have no offset, so on a card kernels of
ours compute the norms of those families. Where flash-linear-attention is installed, its kernels compute the gated norms of rows as wide as
an attention head.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpctl.kernels.autograd import AutogradContext

try:
    from fla.modules.norm.fused_norm_gate import rms_norm_gated as _fla_gated_norm
except ImportError:
    _fla_gated_norm = None


NARROW = 256
"""Columns of the widest rows whose gated norms flash-linear-attention's kernel computes."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / rms(x) · (offset + weight), in the shape and dtype of x [..., n]; weight [n]."""
    if x.is_cuda and offset:
        found: Tensor = _Norm.apply(x, weight, eps, offset)
        return found
    if offset and x.dtype in (torch.bfloat16, torch.float16):  # their sum with 1 would lose most digits of a small weight
        return F.rms_norm(x.float(), (len(weight),), weight.float() + offset, eps).to(x.dtype)
    return F.rms_norm(x, (len(weight),), weight + offset if offset else weight, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight · silu(gate), in the shape and dtype of x [..., n]; gate [..., n], weight [n]."""
    # The kernel cannot be started for no rows at all.
    if x.is_cuda and _fla_gated_norm is not None and x.shape[-1] <= NARROW and x.numel() > 0:
        found: Tensor = _fla_gated_norm(x, gate, weight, None, eps=eps)
        return found
    return (F.rms_norm(x, (len(weight),), weight, eps) * F.silu(gate.float())).to(x.dtype)


class _Context(AutogradContext, Protocol):
    constants: tuple[float, float]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        from mtpctl.kernels import norm_triton

        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.constants = eps, offset
        return norm_triton.normed(x, weight, eps, offset)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        from mtpctl.kernels import norm_triton

        x, weight = ctx.saved_tensors
        return *norm_triton.gradients(grads[0], x, weight, *ctx.constants), None, None
