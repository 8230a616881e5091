"""A teacher's gains, held against the exact gradient of the KL divergence of a distribution over a few tokens."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from mtpctl.rl.distillation import MOST, teacher_gain


@pytest.mark.parametrize("kl", ["reverse", "forward"])
def test_the_expected_policy_gradient_is_that_of_the_negative_kl(kl: Literal["reverse", "forward"]) -> None:
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.tensor([1.0, 0.2, -0.5, 0.4], dtype=torch.float64), 0)
    policy = torch.log_softmax(logits, 0)
    apart = policy - teacher
    divergence = (policy.exp() * apart).sum() if kl == "reverse" else -(teacher.exp() * apart).sum()
    (right,) = torch.autograd.grad(-divergence, logits, retain_graph=True)
    gain = teacher_gain(kl, teacher.numpy().astype(np.float32), policy.detach().numpy().astype(np.float32))
    (found,) = torch.autograd.grad((policy.detach().exp() * torch.from_numpy(gain) * policy).sum(), logits)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


def test_tokens_that_the_policy_hardly_samples_weigh_no_more_than_the_bound() -> None:
    gains = teacher_gain("forward", np.array([-0.1, -0.1, -5.0], np.float32), np.array([-200.0, -0.1, -0.1], np.float32))
    assert np.allclose(gains, [MOST - 1, 0.0, np.exp(-4.9) - 1], atol=1e-5)
