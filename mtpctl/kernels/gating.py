"""The scores of a router: logits in fp32 of states and weights in half precision.

A product of two bf16 numbers is exact in fp32, so the logits are those of operands that were widened first, but for the order of their
sums; no wide copy of the states is made. The gradient of the logits is fp32. On a card it is taken as the sum of two half numbers, which
keeps 16 of its bits where the gradients that come of it keep 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtpctl.kernels import products
from mtpctl.kernels.autograd import AutogradContext


def router_logits(states: Tensor, weight: Tensor) -> Tensor:
    """states [..., H], weight [E, H] → fp32 [..., E]. Gradients are in the dtypes of states and weight."""
    found: Tensor = _RouterLogits.apply(states, weight)
    return found


class _RouterLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, states: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(states, weight)
        return products.logits(states.flatten(0, -2), weight).view(*states.shape[:-1], -1)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor, Tensor]:
        states, weight = ctx.saved_tensors
        x, grad = states.flatten(0, -2), grads[0].flatten(0, -2)
        if x.is_cuda and x.dtype in products.HALF:
            high = grad.to(x.dtype)
            low = (grad - high).to(x.dtype)
            of_states, of_weight = _sum_of_products(high, low, weight), _sum_of_products(high.t(), low.t(), x)
        else:
            of_states, of_weight = grad @ weight.to(grad.dtype), grad.t() @ x.to(grad.dtype)
        return of_states.to(states.dtype).view_as(states), of_weight.to(weight.dtype)


def _sum_of_products(a: Tensor, b: Tensor, other: Tensor) -> Tensor:
    """a @ other + b @ other in fp32."""
    return torch.addmm(torch.mm(a, other, out_dtype=torch.float32), b, other, out_dtype=torch.float32)
