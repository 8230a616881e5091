"""SwiGLU (arXiv 2002.05202): silu(gate) · up · scale, where gate and up are the halves of one linear layer's output.

Only the arguments are kept for the backward pass. On a card one kernel makes the product and one its gradients, in fp32, rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpctl.kernels.autograd import AutogradContext


def gated_product(both: Tensor, scale: Tensor | None = None) -> Tensor:
    """both [..., 2 F]: gate, then up; scale [...], or None for 1 → silu(gate) · up · scale [..., F]."""
    return _GatedProduct.apply(both, scale)


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, both: Tensor, scale: Tensor | None) -> Tensor:
        ctx.save_for_backward(both, scale)
        if both.is_cuda:
            from mtpctl.kernels import gated_triton

            return gated_triton.product(both, scale)
        return _product(both, scale)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        both, scale = ctx.saved_tensors
        if both.is_cuda:
            from mtpctl.kernels import gated_triton

            return gated_triton.gradients(grads[0], both, scale)
        return _gradients(grads[0], both, scale)


def _product(both: Tensor, scale: Tensor | None) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    product = F.silu(gate) * up
    return product if scale is None else (product * scale[..., None]).to(both.dtype)


def _gradients(grad: Tensor, both: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    gate, up = both.chunk(2, dim=-1)
    share = gate.sigmoid()
    scale_grad = None
    if scale is not None:
        scale_grad = (grad.to(scale.dtype) * (gate * share * up)).sum(-1)
        grad = grad * scale[..., None]
    gate_grad = grad * up * (share * (1 + gate * (1 - share)))
    return torch.cat([gate_grad, grad * (gate * share)], dim=-1).to(both.dtype), scale_grad
