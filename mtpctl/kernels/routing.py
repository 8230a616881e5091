"""The choice of experts from a router's logits, and their shares in a token's sum.

    softmax of the chosen     share = exp(l) / Σ_chosen exp(l)
    softmax of all            share = exp(l) / Σ_all exp(l)
    sigmoid                   share = σ(l) / Σ_chosen σ(l), the chosen being those of the largest σ(l) + bias (arXiv 2408.15664);
                              where a token visits one expert, share = σ(l)

Each share is multiplied by a constant. On a card one kernel chooses and one computes the gradient, in place of some thirty small ones.
Shape legend: T tokens, E experts, k experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from mtpctl.kernels.autograd import AutogradContext

Scores = Literal["softmax of the chosen", "softmax of all", "sigmoid"]


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How many experts a token visits, what their shares are, and what the shares are multiplied by."""

    k: int
    scores: Scores
    scaling: float = 1.0


@dataclass(frozen=True, slots=True)
class ReplayedRoutes:
    """Experts that tokens go to in place of those that their logits choose: `experts` [T, k], different ones for each token, where
    `replayed` [T] is set.

    counts [2] int64: how many of these the logits would have chosen too, and how many there are, is added to it. None counts nothing.
    """

    experts: Tensor
    replayed: Tensor
    counts: Tensor | None = None


def route(
    logits: Tensor, bias: Tensor | None, rule: RoutingRule, load: Tensor | None = None, replay: ReplayedRoutes | None = None
) -> tuple[Tensor, Tensor]:
    """Shares and routes [T, E], bool, of logits [T, E] in fp32 on a card, with k experts a token; `bias` [E] only moves the choice.

    `load` [E] int64: each expert's number of tokens is added to it. Of equal scores the first counts as the larger.
    """
    found: tuple[Tensor, Tensor] = _Routed.apply(logits, bias, rule, load, replay)
    return found


class _Context(AutogradContext, Protocol):
    rule: RoutingRule


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, logits: Tensor, bias: Tensor | None, rule: RoutingRule, load: Tensor | None, replay: ReplayedRoutes | None
    ) -> tuple[Tensor, Tensor]:
        from mtpctl.kernels import routing_triton

        shares, routes = routing_triton.route(logits, bias, rule, load, replay)
        ctx.save_for_backward(logits, routes)
        ctx.mark_non_differentiable(routes)
        ctx.rule = rule
        return shares, routes

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        from mtpctl.kernels import routing_triton

        logits, routes = ctx.saved_tensors
        return routing_triton.gradient(grads[0], logits, routes, ctx.rule), None, None, None, None
