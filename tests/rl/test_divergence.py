"""KL estimators: their values, their signs, their means, and which of their gradients teach."""

from __future__ import annotations

import math

import pytest
import torch

from mtpctl.rl.divergence import kl_estimate


def test_values() -> None:
    p, q = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert kl_estimate(p, q, "k1").item() == pytest.approx(math.log(2))
    assert kl_estimate(p, q, "k2").item() == pytest.approx(math.log(2) ** 2 / 2)
    assert kl_estimate(p, q, "k3").item() == pytest.approx(0.5 + math.log(2) - 1)


def test_k3_is_never_negative_and_zero_only_where_equal() -> None:
    torch.manual_seed(0)
    p, q = torch.randn(10000) * 5, torch.randn(10000) * 5
    assert kl_estimate(p, q, "k3").min() > 0
    assert kl_estimate(p, p, "k3").abs().max() == 0


def expectation(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimator and its gradient, in expectation over samples of p, with the logits of p; summed out over the vocabulary."""
    torch.manual_seed(1)
    logits = torch.randn(9, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(9, dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    mean = (logp.exp().detach() * kl_estimate(logp, reference, kind)).sum()  # type: ignore[arg-type]
    exact = (logp.exp() * (logp - reference)).sum()
    (gradient,) = torch.autograd.grad(mean, logits, retain_graph=True)
    (exact_gradient,) = torch.autograd.grad(exact, logits)
    return mean - exact, gradient - exact_gradient


def test_k1_and_k3_are_unbiased_and_k2_has_the_true_gradient() -> None:
    assert expectation("k1")[0].abs() < 1e-12
    assert expectation("k3")[0].abs() < 1e-12
    assert expectation("k2")[0].abs() > 1e-3
    assert expectation("k2")[1].abs().max() < 1e-12
    assert expectation("k3")[1].abs().max() > 1e-3


def test_far_apart_is_finite() -> None:
    far = kl_estimate(torch.tensor([-500.0]), torch.tensor([0.0]), "k3")
    assert torch.isfinite(far).all()
