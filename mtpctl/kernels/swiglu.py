"""SwiGLU (arXiv 2002.05202): silu(gate) · up · scale, where gate and up are the halves of one linear layer's output.

The backward pass needs the arguments alone, and nothing else is kept for it. On a card one kernel computes the product and another one
its gradients; both compute in fp32 and round once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpctl.kernels.autograd import AutogradContext


def swiglu(gate_up: Tensor, scale: Tensor | None = None) -> Tensor:
    """silu(gate) · up · scale [..., F], in the dtype of `gate_up` [..., 2 F], which holds the gate and then up.

    `scale` [...] is one factor a row, such as an expert's share of a token; None stands for 1. It gets a gradient too.
    """
    return _Swiglu.apply(gate_up, scale)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, gate_up: Tensor, scale: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate_up, scale)
        if gate_up.is_cuda:
            from mtpctl.kernels import swiglu_triton

            return swiglu_triton.product(gate_up, scale)
        return _product(gate_up, scale)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        gate_up, scale = ctx.saved_tensors
        if gate_up.is_cuda:
            from mtpctl.kernels import swiglu_triton

            return swiglu_triton.gradients(grads[0], gate_up, scale)
        return _gradients(grads[0], gate_up, scale)


def _product(gate_up: Tensor, scale: Tensor | None) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    product = F.silu(gate) * up
    return product if scale is None else (product * scale[..., None]).to(gate_up.dtype)


def _gradients(grad: Tensor, gate_up: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    gate, up = gate_up.chunk(2, dim=-1)
    sigmoid = gate.sigmoid()
    scale_grad = None
    if scale is not None:
        scale_grad = (grad.to(scale.dtype) * (gate * sigmoid * up)).sum(-1)
        grad = grad * scale[..., None]
    gate_grad = grad * up * (sigmoid * (1 + gate * (1 - sigmoid)))
    return torch.cat([gate_grad, grad * (gate * sigmoid)], dim=-1).to(gate_up.dtype), scale_grad
