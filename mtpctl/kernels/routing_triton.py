# mypy: disallow-untyped-defs=False
# (what is inside a Triton kernel has no Python types)
"""Triton kernels that choose experts and compute the gradient of their shares; a program takes all experts of some tokens.

The shape legend is that of `mtpctl.kernels.routing`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpctl.kernels.routing import ReplayedRoutes, RoutingRule
from mtpctl.kernels.triton_backend import on_device_of

ELEMENTS = 4096
"""Tokens times experts that one program takes."""
LEAST = -3.0e38
"""Takes the place of smaller scores and of NaN, so that a token is sent to k different experts whatever its logits are."""


@triton.jit
def _tile(tokens, experts, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    """This program's tokens, the experts, which of both there are, and the places of their pairs in [T, E]."""
    token, column = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, EXPERTS)
    inside = (token < tokens)[:, None] & (column < experts)[None, :]
    return token, column, inside, token.to(tl.int64)[:, None] * experts + column[None, :]


@triton.jit
def _shares(logits, chosen, column, experts, SIGMOID: tl.constexpr, OF_ALL: tl.constexpr, ONE: tl.constexpr):
    """What each expert's share would be if only these logits counted (0 where it counts for nothing), before it is multiplied."""
    counts = (column < experts)[None, :] if OF_ALL else chosen
    if SIGMOID:
        scores = tl.where(counts, tl.sigmoid(logits), 0.0)
        total = tl.full((logits.shape[0],), 1.0, tl.float32) if ONE else tl.sum(scores, 1) + 1e-20
    else:
        top = tl.max(tl.where(counts, logits, float("-inf")), 1)
        scores = tl.where(counts, tl.exp(logits - top[:, None]), 0.0)
        total = tl.sum(scores, 1)
    return scores / total[:, None]


@triton.jit
def choose(
    logits_ptr,  # fp32 [T, E]
    bias_ptr,  # fp32 [E], read where BIASED
    replayed_ptr,  # [T, k] integers, read where REPLAYS
    where_ptr,  # bytes [T], read where REPLAYS
    shares_ptr,  # fp32 [T, E]
    routes_ptr,  # bytes [T, E]
    load_ptr,  # int64 [E], added to where COUNTED
    agreed_ptr,  # int64 [2], added to where COMPARED
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
    token, column, inside, place = _tile(tokens, experts, TOKENS, EXPERTS)
    logits = tl.load(logits_ptr + place, mask=inside, other=0.0)
    scores = tl.sigmoid(logits) if SIGMOID else logits
    if BIASED:
        scores += tl.load(bias_ptr + column, mask=column < experts, other=0.0)[None, :]
    scores = tl.where(scores > lowest, scores, lowest)
    scores = tl.where((column < experts)[None, :], scores, float("-inf"))
    chosen = (token < 0)[:, None] & (column < 0)[None, :]
    for _ in tl.static_range(K):
        best = tl.argmax(scores, 1)
        taken = column[None, :] == best[:, None]
        chosen = chosen | taken
        scores = tl.where(taken, float("-inf"), scores)
    if REPLAYS:
        here = tl.load(where_ptr + token, mask=token < tokens, other=0) != 0
        given = (token < 0)[:, None] & (column < 0)[None, :]
        for i in tl.static_range(K):
            expert = tl.load(replayed_ptr + token.to(tl.int64) * K + i, mask=here, other=-1).to(tl.int32)
            given = given | (column[None, :] == expert[:, None])
        if COMPARED:
            tl.atomic_add(agreed_ptr, tl.sum((given & chosen).to(tl.int64)))
            tl.atomic_add(agreed_ptr + 1, tl.sum(here.to(tl.int64)) * K)
        chosen = (given & here[:, None]) | (chosen & (here == 0)[:, None])
    shares = _shares(logits, chosen, column, experts, SIGMOID, OF_ALL, K == 1)
    tl.store(shares_ptr + place, tl.where(chosen, shares, 0.0) * scaling, mask=inside)
    tl.store(routes_ptr + place, chosen.to(tl.uint8), mask=inside)
    if COUNTED:
        counts = tl.sum((chosen & inside).to(tl.int32), 0)
        tl.atomic_add(load_ptr + column, counts.to(tl.int64), mask=(column < experts) & (counts > 0))


@triton.jit
def choose_back(
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
    _token, column, inside, place = _tile(tokens, experts, TOKENS, EXPERTS)
    logits = tl.load(logits_ptr + place, mask=inside, other=0.0)
    chosen = tl.load(routes_ptr + place, mask=inside, other=0) != 0
    grad = tl.where(chosen, tl.load(grad_ptr + place, mask=inside, other=0.0), 0.0) * scaling
    shares = _shares(logits, chosen, column, experts, SIGMOID, OF_ALL, ONE)
    # Of a share x_i / Σ x: dL/dl_i = share_i (g_i − Σ_j share_j g_j) x_i′ / x_i, where x is exp or the sigmoid of l.
    mean = tl.sum(grad * shares, 1)[:, None]
    if SIGMOID:
        sigmoid = tl.sigmoid(logits)
        found = shares * (grad if ONE else grad - mean) * (1.0 - sigmoid)
    else:
        found = shares * (grad - mean)
    tl.store(logits_grad_ptr + place, found, mask=inside)


def route(
    logits: Tensor, bias: Tensor | None, rule: RoutingRule, load: Tensor | None, replay: ReplayedRoutes | None
) -> tuple[Tensor, Tensor]:
    """`mtpctl.kernels.routing.route`, without a graph."""
    logits = logits.contiguous()
    shares, routes = torch.empty_like(logits), torch.empty_like(logits, dtype=torch.bool)
    if len(logits):
        grid, shape = _launch(logits, rule)
        named, where, agreed = (None, None, None) if replay is None else (replay.experts, replay.replayed, replay.counts)
        named = None if named is None else named.contiguous()
        biases, loads, experts, places, counts = (
            logits if x is None else x for x in (bias, load, named, None if where is None else where.contiguous().view(torch.uint8), agreed)
        )
        with on_device_of(logits):
            choose[grid](
                logits, biases, experts, places, shares, routes.view(torch.uint8), loads, counts, *logits.shape, rule.scaling, LEAST,
                K=rule.k, BIASED=bias is not None, REPLAYS=replay is not None, COUNTED=load is not None, COMPARED=agreed is not None,
                **shape,
            )  # fmt: skip
    return shares, routes


def gradient(grad: Tensor, logits: Tensor, routes: Tensor, rule: RoutingRule) -> Tensor:
    """The gradient [T, E] of the logits, from that of the shares."""
    logits = logits.contiguous()
    found = torch.empty_like(logits)
    if len(logits):
        grid, shape = _launch(logits, rule)
        with on_device_of(logits):
            choose_back[grid](
                grad.contiguous(), logits, routes.view(torch.uint8), found, *logits.shape, rule.scaling, ONE=rule.k == 1, **shape
            )
    return found


def _launch(logits: Tensor, rule: RoutingRule) -> tuple[tuple[int], dict[str, int | bool]]:
    tokens, experts = logits.shape
    width = triton.next_power_of_2(experts)
    block = max(1, ELEMENTS // width)
    names = {"SIGMOID": rule.scores == "sigmoid", "OF_ALL": rule.scores == "softmax of all"}
    return (triton.cdiv(tokens, block),), names | {"TOKENS": block, "EXPERTS": width}
