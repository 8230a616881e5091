"""Expert selection from router logits (upstream on a CPU, one kernel on CUDA), and fp32 router logits."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from mtpctl.kernels.routing import RoutingRule, route, router_logits
from tests.fakes.kernel_routes import ROUTING_CASES, RoutingCase, plain_route


@pytest.mark.parametrize("case", [case for case in ROUTING_CASES if not case.replays], ids=str)
def test_reference_matches_upstream_routing(case: RoutingCase) -> None:
    logits, bias, _grad = case.drawn()
    rule = case.rule
    probs, routes = topk_routing_with_score_function(
        logits,
        rule.k,
        use_pre_softmax=rule.scores == "softmax of all",
        scaling_factor=rule.scaling,
        score_function="sigmoid" if rule.scores == "sigmoid" else "softmax",
        expert_bias=bias,
    )
    actual = plain_route(logits, bias, rule)
    assert torch.equal(actual[1], routes) and torch.allclose(actual[0], probs)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [*ROUTING_CASES, RoutingCase(8192, 128, RoutingRule(8, "softmax of the chosen")), RoutingCase(0, 8, RoutingRule(2, "sigmoid"))]
)
def test_cuda_routing_matches_the_reference(case: RoutingCase) -> None:
    logits, bias, grad = case.drawn("cuda")
    load = torch.ones(case.experts, dtype=torch.int64, device="cuda")
    replay = case.replay("cuda")
    probs, routes = route(logits.requires_grad_(), bias, case.rule, load, replay)
    (gradient,) = torch.autograd.grad(probs, logits, grad)
    case.assert_right(probs, routes, gradient)
    case.assert_counted(replay)
    assert torch.equal(load - 1, routes.sum(0))


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        ("cpu", torch.bfloat16),
        pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize(("tokens", "experts", "hidden"), [(700, 128, 256), (9, 5, 96)])
def test_router_logits_are_fp32_and_gradients_rounded_once(device: str, dtype: torch.dtype, tokens: int, experts: int, hidden: int) -> None:
    torch.manual_seed(0)
    states, weight = (torch.randn(*shape, device=device).to(dtype).requires_grad_() for shape in ((tokens, 1, hidden), (experts, hidden)))
    upstream = torch.randn(tokens, 1, experts, device=device)
    logits = router_logits(states, weight)
    assert logits.dtype == torch.float32 and logits.shape == (tokens, 1, experts)
    exact = [each.detach().double().requires_grad_() for each in (states, weight)]
    expected = exact[0] @ exact[1].t()
    assert (logits.double() - expected).norm() <= 1e-6 * expected.norm()
    actual, target = torch.autograd.grad(logits, [states, weight], upstream), torch.autograd.grad(expected, exact, upstream.double())
    for tensor, reference in zip(actual, target, strict=True):
        assert tensor.dtype == dtype
        assert (tensor.double() - reference).norm() <= 1.05 * (reference.to(dtype).double() - reference).norm() + 1e-6 * reference.norm()


def test_router_weight_gradient_is_only_in_its_buffer() -> None:
    states, weight = torch.randn(7, 1, 12, requires_grad=True), torch.randn(5, 12, requires_grad=True)
    weight.main_grad = torch.ones(5, 12)  # type: ignore[attr-defined]
    upstream = torch.randn(7, 1, 5)
    router_logits(states, weight).backward(upstream)
    assert weight.grad is None and states.grad is not None
    torch.testing.assert_close(weight.main_grad, 1 + upstream[:, 0].t() @ states.detach()[:, 0])  # type: ignore[attr-defined]
