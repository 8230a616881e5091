"""A router's logits in fp32, from states and weights in half precision, without copying the states to fp32.

The product of two bf16 numbers is exact in fp32. So the logits equal those of operands that were converted to fp32 first, except for the
order in which the products are added up. The gradient of the logits is fp32. For its products on a card it is split into the sum of two
half-precision numbers, which keeps 16 bits of it; the gradients that are computed from it keep 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtpctl.kernels import products
from mtpctl.kernels.autograd import AutogradContext


def router_logits(states: Tensor, weight: Tensor) -> Tensor:
    """The logits [..., E] of E experts in fp32, from states [..., H] and the router's weight [E, H], both of one dtype.

    The gradients have the dtypes of states and weight.
    """
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
            parts = _split(grad, x.dtype)
            twice = weight.repeat(2, 1)
            # Where its rows are not aligned, the library's product was seen to round to half precision more than once.
            aligned = parts.shape[1] % products.ALIGNED == 0
            of_states = parts @ twice if aligned else torch.mm(parts, twice, out_dtype=torch.float32)
            of_weight = torch.mm(parts.t(), x, out_dtype=torch.float32).view(2, *weight.shape).sum(0)
        else:
            of_states, of_weight = grad @ weight.to(grad.dtype), grad.t() @ x.to(grad.dtype)
        return of_states.to(states.dtype).view_as(states), of_weight.to(weight.dtype)


def _split(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers of fp32 [n, E] as sums of two of half precision → [n, 2 E]: the rounded numbers, and behind them what rounding took away."""
    parts = torch.empty(len(x), 2, x.shape[1], dtype=dtype, device=x.device)
    high, low = parts.unbind(1)
    high.copy_(x)
    torch.sub(x, high, out=low)
    return parts.flatten(1)
