"""A teacher's gains against the exact gradient of the KL divergence of a small distribution."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch

from mtpctl.rl.losses import MAX_RATIO, candidate_kl, teacher_gain


@pytest.mark.parametrize("kl", ["reverse", "forward"])
def test_the_expected_policy_gradient_is_that_of_the_negative_kl(kl: Literal["reverse", "forward"]) -> None:
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.tensor([1.0, 0.2, -0.5, 0.4], dtype=torch.float64), 0)
    policy = torch.log_softmax(logits, 0)
    apart = policy - teacher
    divergence = (policy.exp() * apart).sum() if kl == "reverse" else -(teacher.exp() * apart).sum()
    (right,) = torch.autograd.grad(-divergence, logits, retain_graph=True)
    gain = teacher_gain(kl, teacher, policy.detach())
    (result,) = torch.autograd.grad((policy.detach().exp() * gain * policy).sum(), logits)
    torch.testing.assert_close(result, right, rtol=1e-5, atol=1e-6)


def test_weight_of_unlikely_tokens_is_bounded() -> None:
    gains = teacher_gain("forward", torch.tensor([-0.1, -0.1, -5.0]), torch.tensor([-200.0, -0.1, -0.1]))
    assert torch.allclose(gains, torch.tensor([MAX_RATIO - 1, 0.0, math.exp(-4.9) - 1]), atol=1e-5)


@pytest.mark.parametrize("kl", ["reverse", "forward"])
def test_kl_over_candidates_increases_with_their_number_up_to_the_full_kl(kl: Literal["reverse", "forward"]) -> None:
    torch.manual_seed(0)
    policy, teacher = torch.log_softmax(torch.randn(2, 5, 40, dtype=torch.float64), -1)
    whole = (policy.exp() * (policy - teacher)).sum(-1) if kl == "reverse" else (teacher.exp() * (teacher - policy)).sum(-1)
    before = torch.zeros(5, dtype=torch.float64)
    for count in (1, 4, 16, 39):
        likely, ids = teacher.topk(count, -1)
        named = policy.gather(-1, ids)
        apart = candidate_kl(kl, named, (1 - named.exp().sum(-1)).log(), likely)
        assert (before - 1e-9 <= apart).all() and (apart <= whole + 1e-9).all()
        before = apart
    torch.testing.assert_close(before, whole)
    likely, ids = teacher.topk(4, -1)
    assert candidate_kl(kl, likely, (1 - likely.exp().sum(-1)).log(), likely).abs().max() < 1e-12
