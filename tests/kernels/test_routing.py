"""The choice of experts by a router's logits: on a CPU as upstream makes it, on a card by one kernel."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from mtpctl.kernels.routing import RoutingRule, route
from tests.fakes.kernel_routes import ROUTING_CASES, RoutingCase, plain_route


@pytest.mark.parametrize("case", [case for case in ROUTING_CASES if not case.replays], ids=str)
def test_shares_and_routes_are_upstreams(case: RoutingCase) -> None:
    logits, bias, _grad = case.drawn()
    rule = case.rule
    shares, routes = topk_routing_with_score_function(
        logits,
        rule.k,
        use_pre_softmax=rule.scores == "softmax of all",
        scaling_factor=rule.scaling,
        score_function="sigmoid" if rule.scores == "sigmoid" else "softmax",
        expert_bias=bias,
    )
    found = plain_route(logits, bias, rule)
    assert torch.equal(found[1], routes) and torch.allclose(found[0], shares)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [*ROUTING_CASES, RoutingCase(8192, 128, RoutingRule(8, "softmax of the chosen")), RoutingCase(0, 8, RoutingRule(2, "sigmoid"))]
)
def test_a_card_chooses_the_same(case: RoutingCase) -> None:
    logits, bias, grad = case.drawn("cuda")
    load = torch.ones(case.experts, dtype=torch.int64, device="cuda")
    replay = case.replay("cuda")
    shares, routes = route(logits.requires_grad_(), bias, case.rule, load, replay)
    (gradient,) = torch.autograd.grad(shares, logits, grad)
    case.assert_right(shares, routes, gradient)
    case.assert_counted(replay)
    assert torch.equal(load - 1, routes.sum(0))
