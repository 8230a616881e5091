"""Experts of `numerics: bitwise`: rows are independent of other rows, and gradients are those of the usual operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mtpctl.kernels import exact_experts, exact_grad
from mtpctl.kernels.grouped import WeightStack, grouped_linear
from mtpctl.kernels.routing import router_logits


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("over_all", [False, True])
def test_token_has_the_same_bits_in_any_batch(over_all: bool) -> None:
    x, router, gate_up, down = drawn(40, 24), drawn(7, 24, seed=1), drawn(7, 32, 24, seed=2), drawn(7, 24, 16, seed=3)

    def run(states: Tensor) -> Tensor:
        logits = exact_grad.router_logits(states, router)
        return exact_experts.run_experts(states, logits, exact_experts.top_experts(logits, 3), gate_up, down, over_all=over_all)

    whole = run(x)
    for start, count in ((0, 1), (3, 2), (17, 5), (1, 33)):
        assert torch.equal(run(x[start : start + count]), whole[start : start + count])
    logits = x @ router.T
    probs = logits.softmax(-1) if over_all else logits.topk(3).values.softmax(-1)
    expected = torch.zeros_like(x)
    for rank, experts in enumerate(logits.topk(3).indices.T):
        prob = probs.gather(1, experts[:, None]) if over_all else probs[:, rank, None]
        for token, expert in enumerate(experts):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            expected[token] += prob[token] * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    assert torch.allclose(whole, expected, rtol=1e-4, atol=1e-4)


def test_equal_logits_select_the_first_experts() -> None:
    assert exact_experts.top_experts(torch.tensor([[1.0, 2.0, 1.0, 1.0]]), 3).tolist() == [[1, 0, 2]]


@pytest.mark.parametrize("over_all", [False, True])
def test_gradients_are_those_of_the_usual_operations(over_all: bool) -> None:
    states, router, weights, scale = drawn(9, 24), drawn(5, 24, seed=1), drawn(3, 32, 24, seed=2), drawn(9, seed=3).abs()
    ends = torch.tensor([2, 2, 9]).int()

    def outputs(states: Tensor, router: Tensor, weights: Tensor, scale: Tensor, *, is_exact: bool) -> Tensor:
        logits = exact_grad.router_logits(states, router) if is_exact else router_logits(states, router)
        experts = exact_experts.top_experts(logits, 2)
        if is_exact:
            probs, _routes = exact_grad.route(logits, experts, over_all=over_all)
        else:
            chosen = logits.softmax(-1).gather(1, experts) if over_all else logits.gather(1, experts).softmax(-1)
            probs = torch.zeros_like(logits).scatter(1, experts, chosen)
        product = (exact_experts.grouped_linear,) if is_exact else ()
        inner = grouped_linear(states, ends, WeightStack(weights.unbind()), *product)
        gate, up = inner.chunk(2, -1)
        out = exact_grad.swiglu(inner, scale) if is_exact else torch.nn.functional.silu(gate) * up * scale[:, None]
        return torch.cat([probs, out], -1)

    results = []
    for is_exact in (True, False):
        leaves = [each.clone().requires_grad_() for each in (states, router, weights, scale)]
        out = outputs(*leaves, is_exact=is_exact)
        results.append([out.detach(), *torch.autograd.grad((out * drawn(*out.shape, seed=4)).sum(), leaves)])
    for actual, expected in zip(*results, strict=True):
        assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
