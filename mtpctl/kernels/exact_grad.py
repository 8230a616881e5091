"""The trainer's operations for `numerics: bitwise`: `mtpctl.kernels.exact` on a CPU, `mtpctl.kernels.invariant` on CUDA, with gradients.

Only the forward pass has to match the engine's. Gradients are those of PyTorch's operations at the same inputs; on a CPU they ignore the
rounding to integers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mtpctl.kernels import activations, exact, exact_delta, exact_experts, invariant, norm, qkv, routing
from mtpctl.kernels.activations import swiglu_backward_torch
from mtpctl.kernels.products import linear_backward
from mtpctl.kernels.qkv import Angles, HeadLayout, HeadNorm, Heads


def linear(x: Tensor, weight: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """x [..., in] · weight [out, in]ᵀ → [..., out]. The weight's gradient goes to Megatron's buffer, if it has one.

    group: ranks that each have a slice of the input dimension, of equal sizes. All get the sum, and all must pass the same gradient of it.
    """
    return _Linear.apply(x, weight, group)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """`exact.rms_norm` or `invariant.rms_norm`, with gradients."""
    if x.is_cuda:
        return norm.rms_norm_by_row(x, weight, eps, offset)
    return with_gradients_of(
        lambda x, weight: F.rms_norm(x, (len(weight),), weight + offset, eps), partial(exact.rms_norm, eps=eps, offset=offset), x, weight
    )


def split_normed_heads(mixed: Tensor, layout: HeadLayout, qk_norm: HeadNorm, angles: Angles | None) -> Heads:
    """`qkv.split_heads` with QK norm, but the norm's output is rounded before the rotation, as in an engine."""
    heads = qkv.split_heads(mixed, layout, None, None)
    queries, keys = (
        rms_norm(x, weight, qk_norm.eps, qk_norm.offset) for x, weight in ((heads.queries, qk_norm.queries), (heads.keys, qk_norm.keys))
    )
    if angles is not None:
        queries, keys = (_Rotation.apply(x, *angles) for x in (queries, keys))
    return heads._replace(queries=queries, keys=keys)


def attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> Tensor:
    """`exact.attention` on a CPU, with gradients."""
    inexact = partial(F.scaled_dot_product_attention, attn_mask=visible, scale=scale, enable_gqa=True)
    return with_gradients_of(inexact, partial(exact.attention, visible=visible, scale=scale), query, key, value)


def swiglu(gate_up: Tensor, scale: Tensor | None = None) -> Tensor:
    """`exact.swiglu` or `invariant.swiglu`, with gradients."""
    if gate_up.is_cuda:
        return activations.swiglu(gate_up, scale)
    return _Swiglu.apply(gate_up, scale)


def router_logits(states: Tensor, weight: Tensor) -> Tensor:
    """`routing.router_logits`, computed by `exact.logits` or `invariant.logits`."""
    return routing.router_logits(states, weight, invariant.logits if states.is_cuda else exact.logits)


def route(logits: Tensor, experts: Tensor, *, over_all: bool) -> tuple[Tensor, Tensor]:
    """Probs and routes (bool), both [T, E], of logits [T, E] and each token's `experts` [T, k]. See `exact_experts.chosen_probs`."""
    routes = exact_experts.route_mask(experts, logits.shape[1])

    def inexact(logits: Tensor) -> Tensor:
        return (logits if over_all else logits.masked_fill(~routes, float("-inf"))).softmax(-1).masked_fill(~routes, 0.0)

    return with_gradients_of(inexact, partial(exact_experts.chosen_probs, routes=routes, over_all=over_all), logits), routes


def with_gradients_of(inexact: Callable[..., Tensor], exact_function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`exact_function(*tensors)`, with the gradients of `inexact(*tensors)`, which runs in the backward pass."""
    return _WithGradients.apply(inexact, exact_function, *tensors)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`exact_delta.gated_rms_norm`, with gradients."""
    inexact, function = (partial(f, eps=eps) for f in (norm.gated_rms_norm, exact_delta.gated_rms_norm))
    return with_gradients_of(inexact, function, x, gate, weight)


def sigmoid(x: Tensor) -> Tensor:
    """`exact.sigmoid` on a CPU, with gradients. On CUDA, PyTorch's: an element does not depend on others."""
    return x.sigmoid() if x.is_cuda else with_gradients_of(torch.sigmoid, exact.sigmoid, x)


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inexact: Callable[..., Tensor], exact_function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.inexact = inexact
        return exact_function(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        inexact, ctx.inexact = ctx.inexact, None  # autograd frees only saved tensors, not tensors that the function refers to
        with torch.enable_grad():
            out = inexact(*tensors)
        return None, None, *torch.autograd.grad(out, tensors, grads[0])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight  # a parameter, which outlives the graph
        rows = x.flatten(0, -2)
        if not x.is_cuda:
            out = exact.linear(rows, weight, group)
        else:
            out = invariant.linear(rows, weight)
            if group is not None:
                # At most two ranks, so the sum of their products in half precision is rounded once, as in the engine.
                dist.all_reduce(out, group=group)
        return out.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *linear_backward(ctx, grads[0]), None


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, scale: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate_up, scale)
        return exact.swiglu(gate_up, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        return swiglu_backward_torch(grads[0], *ctx.saved_tensors)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0].contiguous(), cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotate = invariant.rotate if x.is_cuda else exact.rotate
    return rotate(x, torch.arange(len(x), device=x.device), cos, sin)
