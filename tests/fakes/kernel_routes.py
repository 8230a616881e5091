"""Random routes, and cases of expert selection with a plain PyTorch reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtpctl.kernels.routing import ReplayedRoutes, RoutingRule, Scores
from mtpctl.kernels.rows import ExpertOrder

SCORES: tuple[Scores, ...] = ("softmax of the chosen", "softmax of all", "sigmoid")


def drawn_routes(tokens: int, experts: int, k: int) -> Tensor:
    """[tokens, experts] bool with k set per token. The last expert is not used unless k needs all."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(tokens, max(k, experts - 1), generator=generator).topk(k, dim=1).indices
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)


def uneven_routes(tokens: int, experts: int, k: int) -> Tensor:
    """[tokens, experts] bool with 0 to k set per token."""
    return drawn_routes(tokens, experts, k) & (torch.rand(tokens, experts, generator=torch.Generator().manual_seed(1)) < 0.6)


def plain_route(logits: Tensor, bias: Tensor | None, rule: RoutingRule, replay: ReplayedRoutes | None = None) -> tuple[Tensor, Tensor]:
    """`mtpctl.kernels.routing.route` in plain PyTorch, without counts: the reference for the kernels."""
    scores = logits.sigmoid() if rule.scores == "sigmoid" else logits
    chosen = (scores if bias is None else scores + bias).topk(rule.k, dim=1).indices
    if replay is not None:
        chosen = torch.where(replay.replayed[:, None], replay.experts.long(), chosen)
    routes = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)
    if rule.scores == "sigmoid":
        of_chosen = scores.masked_fill(~routes, 0.0)
        probs = of_chosen / of_chosen.sum(1, keepdim=True) if rule.k > 1 else of_chosen
    elif rule.scores == "softmax of all":
        probs = logits.softmax(1).masked_fill(~routes, 0.0)
    else:
        probs = logits.masked_fill(~routes, float("-inf")).softmax(1)
    return probs * rule.scaling, routes


@dataclass(frozen=True)
class RoutingCase:
    tokens: int
    experts: int
    rule: RoutingRule
    biased: bool = False
    replays: bool = False

    def replay(self, device: str = "cpu") -> ReplayedRoutes | None:
        """Routes for two thirds of the tokens, or None."""
        if not self.replays:
            return None
        experts = drawn_routes(self.tokens, self.experts, self.rule.k).nonzero()[:, 1].view(self.tokens, -1).to(torch.int16)
        counts = torch.zeros(2, dtype=torch.int64, device=device)
        return ReplayedRoutes(experts.to(device), (torch.arange(self.tokens) % 3 > 0).to(device), counts)

    def drawn(self, device: str = "cpu") -> tuple[Tensor, Tensor | None, Tensor]:
        """Logits, bias, and a gradient of the probs."""
        generator = torch.Generator().manual_seed(0)
        logits, grad = torch.randn(2, self.tokens, self.experts, generator=generator)
        bias = torch.randn(self.experts, generator=generator) if self.biased else None
        return logits.to(device), None if bias is None else bias.to(device), grad.to(device)

    def assert_right(self, probs: Tensor, routes: Tensor, gradient: Tensor) -> None:
        """Compare with autograd through plain PyTorch in float64."""
        logits, bias, grad = self.drawn()
        leaf = logits.double().requires_grad_()
        biases, replay = None if bias is None else bias.double(), self.replay()
        expected, chosen = plain_route(leaf, biases, self.rule, replay)
        assert torch.equal(routes.cpu(), chosen)
        (of_logits,) = torch.autograd.grad(expected, leaf, grad.double())
        for tensor, exact in ((probs, expected), (gradient, of_logits)):
            assert (tensor.cpu().double() - exact).norm() <= 1e-6 * exact.norm()

    def assert_counted(self, replay: ReplayedRoutes | None) -> None:
        """Check the counts of replayed experts that the router would have chosen as well, and of all replayed experts."""
        if replay is None or replay.counts is None:
            return
        logits, bias, _grad = self.drawn()
        own = plain_route(logits, bias, self.rule)[1][replay.replayed.cpu()]
        taken = own.gather(1, replay.experts.cpu().long()[replay.replayed.cpu()])
        assert replay.counts.tolist() == [int(taken.sum()), taken.numel()]


ROUTING_CASES = [
    *(RoutingCase(41, 24, RoutingRule(5, scores)) for scores in SCORES),
    RoutingCase(7, 8, RoutingRule(1, "sigmoid", 2.5), biased=True),
    RoutingCase(30, 60, RoutingRule(8, "sigmoid", 2.5), biased=True),
    RoutingCase(3, 4, RoutingRule(4, "softmax of all", 0.5)),
    RoutingCase(1, 6, RoutingRule(1, "softmax of all")),
    RoutingCase(41, 24, RoutingRule(5, "softmax of the chosen"), replays=True),
    RoutingCase(30, 60, RoutingRule(8, "sigmoid", 2.5), biased=True, replays=True),
]


def assert_same_order(order: ExpertOrder, expected: ExpertOrder) -> None:
    for name in ("row_of", "token_of", "pair_of", "ends"):
        tensor: Tensor = getattr(order, name)
        assert tensor.dtype == (torch.int64 if name == "pair_of" else torch.int32)
        assert torch.equal(tensor.cpu(), getattr(expected, name)), name
