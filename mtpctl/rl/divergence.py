"""Monte-Carlo estimators of KL(p ‖ q) from samples of p: http://joschu.net/blog/kl-approx.html

With l = log p - log q:  k1 = l (unbiased, of either sign),  k2 = l²/2 (biased, low variance),  k3 = exp(-l) + l - 1
(unbiased, never negative). As a term of a loss, differentiated through log p alone, k1 teaches nothing: its gradient is
that of log p, zero in expectation. k2's gradient is that of the true KL on policy; k3's is that of KL(q ‖ p) there.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mtpctl.rl.limits import MAX_LOG_RATIO


def kl_estimate(logprob: Tensor, ref_logprob: Tensor, kind: Literal["k1", "k2", "k3"]) -> Tensor:
    """Per-token estimate [T] of KL(policy ‖ reference) at tokens that the policy sampled."""
    difference = (logprob - ref_logprob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference**2 / 2
    return torch.expm1(-difference) + difference
