"""Rotary position embeddings (RoPE, arXiv 2104.09864) of queries and keys. Dimension i of a head is paired with i + n:

    out[i]     = x[i] cos[i] − x[i + n] sin[i]    i < n, half the number of rotated dimensions
    out[i + n] = x[i + n] cos[i] + x[i] sin[i]    dimensions after the first 2 n are left as they are

On a CPU the products are in x's dtype. On a card one kernel multiplies in fp32 and rounds once. The backward pass rotates the gradient by
the opposite angle.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtpctl.kernels.autograd import AutogradContext


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [t, heads, d] rotated by each token's angles: cos and sin fp32 [t, n], with 2 n ≤ d. Returns x's shape and dtype."""
    if x.is_cuda:
        found: Tensor = _Rotated.apply(x, cos, sin)
        return found
    return plainly_rotated(x, cos.to(x.dtype), sin.to(x.dtype))


def plainly_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotated` in plain PyTorch, in the dtype of its arguments."""
    half = cos.shape[-1]
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        from mtpctl.kernels import rotary_triton

        ctx.save_for_backward(cos, sin)
        return rotary_triton.rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor, None, None]:
        from mtpctl.kernels import rotary_triton

        cos, sin = ctx.saved_tensors
        return rotary_triton.rotated(grads[0], cos, sin, back=True), None, None
