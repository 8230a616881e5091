"""Routes that are drawn: which experts each token visits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtpctl.kernels.routing import RoutingRule, Scores, plainly_routed

SCORES: tuple[Scores, ...] = ("softmax of the chosen", "softmax of all", "sigmoid")


def drawn_routes(tokens: int, experts: int, k: int) -> Tensor:
    """[tokens, experts] bool, k set for each token; nobody visits the last expert, unless all are wanted."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(tokens, max(k, experts - 1), generator=generator).topk(k, dim=1).indices
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)


@dataclass(frozen=True)
class RoutingCase:
    tokens: int
    experts: int
    rule: RoutingRule
    biased: bool = False

    def drawn(self, device: str = "cpu") -> tuple[Tensor, Tensor | None, Tensor]:
        """Logits, bias, and a gradient of the shares."""
        generator = torch.Generator().manual_seed(0)
        logits, grad = torch.randn(2, self.tokens, self.experts, generator=generator)
        bias = torch.randn(self.experts, generator=generator) if self.biased else None
        return logits.to(device), None if bias is None else bias.to(device), grad.to(device)

    def assert_right(self, shares: Tensor, routes: Tensor, gradient: Tensor) -> None:
        """Compare with autograd through plain PyTorch in float64."""
        logits, bias, grad = self.drawn()
        leaf = logits.double().requires_grad_()
        right, chosen = plainly_routed(leaf, None if bias is None else bias.double(), self.rule)
        assert torch.equal(routes.cpu(), chosen)
        (of_logits,) = torch.autograd.grad(right, leaf, grad.double())
        for mine, exact in ((shares, right), (gradient, of_logits)):
            assert (mine.cpu().double() - exact).norm() <= 1e-6 * exact.norm()


ROUTING_CASES = [
    *(RoutingCase(41, 24, RoutingRule(5, scores)) for scores in SCORES),
    RoutingCase(7, 8, RoutingRule(1, "sigmoid", 2.5), biased=True),
    RoutingCase(30, 60, RoutingRule(8, "sigmoid", 2.5), biased=True),
    RoutingCase(3, 4, RoutingRule(4, "softmax of all", 0.5)),
    RoutingCase(1, 6, RoutingRule(1, "softmax of all")),
]
