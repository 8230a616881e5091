"""The router of a mixture of experts: fp32 logits, top-k selection of experts, and the weight (prob) of each selected expert.

    softmax of the chosen     prob = exp(l) / Σ_chosen exp(l)
    softmax of all            prob = exp(l) / Σ_all exp(l)
    sigmoid                   prob = σ(l) / Σ_chosen σ(l), where the k largest σ(l) + bias are chosen (arXiv 2408.15664); if k = 1,
                              prob = σ(l)

Each prob is multiplied by `RoutingRule.scaling`. On CUDA one Triton kernel selects the experts and one computes the gradient, instead of
about thirty small kernels. On a CPU the router uses Megatron's functions (`mtpctl.model.router`).

Shape legend: T tokens, E experts, k experts per token, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, no_type_check

import torch
from torch import Tensor

from mtpctl.kernels import products
from mtpctl.kernels.triton_support import launcher, on_device_of, tl, triton

Scores = Literal["softmax of the chosen", "softmax of all", "sigmoid"]
TILE_ELEMENTS = 4096
"""Tokens times experts per program."""
LOWEST_SCORE = -3.0e38
"""Replaces smaller scores and NaN, so that a token is always routed to k different experts."""


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """k: experts per token. scores: how probs are computed. scaling: factor of all probs."""

    k: int
    scores: Scores
    scaling: float = 1.0


@dataclass(frozen=True, slots=True)
class ReplayedRoutes:
    """Experts [T, k], distinct per token, that override the router's selection for tokens with `replayed` [T] set.

    counts [2] int64, or None: accumulates the number of replayed routes that the router would also have selected, and the number of
    replayed routes.
    """

    experts: Tensor
    replayed: Tensor
    counts: Tensor | None = None


def route(
    logits: Tensor, bias: Tensor | None, rule: RoutingRule, load: Tensor | None = None, replay: ReplayedRoutes | None = None
) -> tuple[Tensor, Tensor]:
    """Probs and routes (bool), both [T, E], of fp32 `logits` [T, E] on CUDA. `bias` [E] affects the selection only.

    `load` [E] int64 accumulates the number of tokens of each expert. Ties go to the lower expert index.
    """
    return _Route.apply(logits, bias, rule, load, replay)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, bias: Tensor | None, rule: RoutingRule, load: Tensor | None, replay: ReplayedRoutes | None
    ) -> tuple[Tensor, Tensor]:
        probs, routes = route_triton(logits, bias, rule, load, replay)
        ctx.save_for_backward(logits, routes)
        ctx.mark_non_differentiable(routes)
        ctx.set_materialize_grads(False)  # zeros for the routes would be another launch
        ctx.rule = rule
        return probs, routes

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        logits, routes = ctx.saved_tensors
        if grads[0] is None:
            return None, None, None, None, None
        return route_backward_triton(grads[0], logits, routes, ctx.rule), None, None, None, None


@triton.jit
@no_type_check
def _tile(tokens, experts, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    """This program's tokens, the experts, the mask of (token, expert) pairs in range, and their indices in [T, E]."""
    token, column = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, EXPERTS)
    inside = (token < tokens)[:, None] & (column < experts)[None, :]
    return token, column, inside, token.to(tl.int64)[:, None] * experts + column[None, :]


@triton.jit
@no_type_check
def _probs(logits, chosen, column, experts, SIGMOID: tl.constexpr, OF_ALL: tl.constexpr, ONE: tl.constexpr):
    """Probs before scaling, normalized over the chosen experts, or over all."""
    included = (column < experts)[None, :] if OF_ALL else chosen
    if SIGMOID:
        scores = tl.where(included, tl.sigmoid(logits), 0.0)
        total = tl.full((logits.shape[0],), 1.0, tl.float32) if ONE else tl.sum(scores, 1) + 1e-20
    else:
        top = tl.max(tl.where(included, logits, float("-inf")), 1)
        scores = tl.where(included, tl.exp(logits - top[:, None]), 0.0)
        total = tl.sum(scores, 1)
    return scores / total[:, None]


@triton.jit
@no_type_check
def route_kernel(
    logits_ptr,  # fp32 [T, E]
    bias_ptr,  # fp32 [E], read if BIASED
    replayed_ptr,  # [T, k] integers, read if REPLAYS
    where_ptr,  # bytes [T], read if REPLAYS
    probs_ptr,  # fp32 [T, E]
    routes_ptr,  # bytes [T, E]
    load_ptr,  # int64 [E], added to if COUNTED
    agreed_ptr,  # int64 [2], added to if COMPARED
    tokens,
    experts,
    scaling,
    lowest,
    K: tl.constexpr,
    SIGMOID: tl.constexpr,
    OF_ALL: tl.constexpr,
    BIASED: tl.constexpr,
    REPLAYS: tl.constexpr,
    COUNTED: tl.constexpr,
    COMPARED: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    token, column, inside, index = _tile(tokens, experts, TOKENS, EXPERTS)
    logits = tl.load(logits_ptr + index, mask=inside, other=0.0)
    scores = tl.sigmoid(logits) if SIGMOID else logits
    if BIASED:
        scores += tl.load(bias_ptr + column, mask=column < experts, other=0.0)[None, :]
    scores = tl.where(scores > lowest, scores, lowest)
    scores = tl.where((column < experts)[None, :], scores, float("-inf"))
    chosen = (token < 0)[:, None] & (column < 0)[None, :]
    for _ in tl.static_range(K):
        best = tl.argmax(scores, 1)
        selected = column[None, :] == best[:, None]
        chosen = chosen | selected
        scores = tl.where(selected, float("-inf"), scores)
    if REPLAYS:
        here = tl.load(where_ptr + token, mask=token < tokens, other=0) != 0
        replayed = (token < 0)[:, None] & (column < 0)[None, :]
        for i in tl.static_range(K):
            expert = tl.load(replayed_ptr + token.to(tl.int64) * K + i, mask=here, other=-1).to(tl.int32)
            replayed = replayed | (column[None, :] == expert[:, None])
        if COMPARED:
            tl.atomic_add(agreed_ptr, tl.sum((replayed & chosen).to(tl.int64)))
            tl.atomic_add(agreed_ptr + 1, tl.sum(here.to(tl.int64)) * K)
        chosen = (replayed & here[:, None]) | (chosen & (here == 0)[:, None])
    probs = _probs(logits, chosen, column, experts, SIGMOID, OF_ALL, K == 1)
    tl.store(probs_ptr + index, tl.where(chosen, probs, 0.0) * scaling, mask=inside)
    tl.store(routes_ptr + index, chosen.to(tl.uint8), mask=inside)
    if COUNTED:
        counts = tl.sum((chosen & inside).to(tl.int32), 0)
        tl.atomic_add(load_ptr + column, counts.to(tl.int64), mask=(column < experts) & (counts > 0))


@triton.jit
@no_type_check
def route_backward_kernel(
    grad_ptr,  # fp32 [T, E]
    logits_ptr,  # fp32 [T, E]
    routes_ptr,  # bytes [T, E]
    logits_grad_ptr,  # fp32 [T, E]
    tokens,
    experts,
    scaling,
    SIGMOID: tl.constexpr,
    OF_ALL: tl.constexpr,
    ONE: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    _token, column, inside, index = _tile(tokens, experts, TOKENS, EXPERTS)
    logits = tl.load(logits_ptr + index, mask=inside, other=0.0)
    chosen = tl.load(routes_ptr + index, mask=inside, other=0) != 0
    grad = tl.where(chosen, tl.load(grad_ptr + index, mask=inside, other=0.0), 0.0) * scaling
    probs = _probs(logits, chosen, column, experts, SIGMOID, OF_ALL, ONE)
    # For prob_i = x_i / Σ x: dL/dl_i = prob_i (g_i − Σ_j prob_j g_j) x_i′ / x_i, where x is exp or the sigmoid of l.
    mean = tl.sum(grad * probs, 1)[:, None]
    if SIGMOID:
        sigmoid = tl.sigmoid(logits)
        logits_grad = probs * (grad if ONE else grad - mean) * (1.0 - sigmoid)
    else:
        logits_grad = probs * (grad - mean)
    tl.store(logits_grad_ptr + index, logits_grad, mask=inside)


def route_triton(
    logits: Tensor, bias: Tensor | None, rule: RoutingRule, load: Tensor | None, replay: ReplayedRoutes | None
) -> tuple[Tensor, Tensor]:
    """`route` without autograd."""
    logits = logits.contiguous()
    probs, routes = torch.empty_like(logits), torch.empty_like(logits, dtype=torch.bool)
    if len(logits):
        grid, options = _launch_options(logits, rule)
        experts = where = agreed = None
        if replay is not None:
            experts, where, agreed = replay.experts.contiguous(), replay.replayed.contiguous().view(torch.uint8), replay.counts
        # The kernel does not read unused pointers.
        bias_ptr, load_ptr, experts_ptr, where_ptr, agreed_ptr = (logits if x is None else x for x in (bias, load, experts, where, agreed))
        with on_device_of(logits):
            launcher(route_kernel, grid)(
                logits, bias_ptr, experts_ptr, where_ptr, probs, routes.view(torch.uint8), load_ptr, agreed_ptr, *logits.shape,
                rule.scaling, LOWEST_SCORE, K=rule.k, BIASED=bias is not None, REPLAYS=replay is not None, COUNTED=load is not None,
                COMPARED=agreed is not None, **options,
            )  # fmt: skip
    return probs, routes


def route_backward_triton(grad: Tensor, logits: Tensor, routes: Tensor, rule: RoutingRule) -> Tensor:
    """Gradient of the logits [T, E] from that of the probs."""
    logits = logits.contiguous()
    logits_grad = torch.empty_like(logits)
    if len(logits):
        grid, options = _launch_options(logits, rule)
        with on_device_of(logits):
            launcher(route_backward_kernel, grid)(
                grad.contiguous(), logits, routes.view(torch.uint8), logits_grad, *logits.shape, rule.scaling, ONE=rule.k == 1, **options
            )
    return logits_grad


def _launch_options(logits: Tensor, rule: RoutingRule) -> tuple[tuple[int], dict[str, int | bool]]:
    tokens, experts = logits.shape
    width = triton.next_power_of_2(experts)
    block = max(1, TILE_ELEMENTS // width)
    options = {"SIGMOID": rule.scores == "sigmoid", "OF_ALL": rule.scores == "softmax of all", "TOKENS": block, "EXPERTS": width}
    return (triton.cdiv(tokens, block),), options


def router_logits(states: Tensor, weight: Tensor, product: Callable[[Tensor, Tensor], Tensor] = products.logits) -> Tensor:
    """fp32 logits [..., E] from states [..., H] and the router's weight [E, H] of one dtype, without converting the states to fp32.

    Products of two bf16 numbers are exact in fp32, so only the order of summation differs from fp32 operands. Gradients have the dtypes of
    states and weight. On CUDA the fp32 logit gradient is split into a sum of two half-precision tensors for the matrix products. With bf16
    this keeps 16 significant bits; the results have 8.

    product: computes fp32 logits [n, E] from states [n, H] and the weight.
    """
    return _RouterLogits.apply(states, (weight,), products.autograd_leaf(weight, states), product)


class _RouterLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weights: tuple[Tensor], _leaf: Tensor | None, product: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        (weight,) = weights
        ctx.save_for_backward(states)
        ctx.weight = weight  # a parameter, which outlives the graph
        return product(states.flatten(0, -2), weight).view(*states.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        (states,), weight = ctx.saved_tensors, ctx.weight
        x, grad = states.flatten(0, -2), grads[0].flatten(0, -2)
        if x.is_cuda and x.dtype in products.HALF_DTYPES:
            addends = _split_addends(grad, x.dtype)
            repeated_weight = torch.cat([weight, weight])
            # For unaligned rows cuBLAS's product rounds to half precision more than once.
            is_aligned = addends.shape[1] % products.ALIGNED_COLUMNS == 0
            states_grad = addends @ repeated_weight if is_aligned else torch.mm(addends, repeated_weight, out_dtype=torch.float32)
            weight_grad = torch.add(*torch.mm(addends.t(), x, out_dtype=torch.float32).chunk(2))
        else:
            states_grad, weight_grad = grad @ weight.to(grad.dtype), grad.t() @ x.to(grad.dtype)
        return states_grad.to(states.dtype).view_as(states), None, products.add_to_buffer(weight, weight_grad), None


def _split_addends(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Split fp32 [n, E] into half-precision addends [n, 2 E]: the rounded numbers, then the rounding errors."""
    addends = torch.empty(len(x), 2, x.shape[1], dtype=dtype, device=x.device)
    high, low = addends.unbind(1)
    high.copy_(x)
    torch.sub(x, high, out=low)
    return addends.flatten(1)
