"""On-policy distillation: divergences between policy and teacher at the tokens that the policy sampled."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Kl = Literal["reverse", "forward"]
MAX_RATIO = 10.0
"""Bound of teacher probability / policy probability in the forward KL; the ratio is unbounded for rare tokens."""
MIN_REST = 1e-6
"""Lower bound of the teacher's probability outside its candidates, in the reverse KL, which diverges at 0. With fp32 log-probs a smaller
value is rounding error, and may be negative."""


def teacher_gain(kl: Kl, teacher: Tensor, behaviour: Tensor) -> Tensor:
    """Per-token gain [T] whose policy gradient is that of the negative KL, from the log-probs of the sampled tokens.

    reverse, KL(policy ‖ teacher): log teacher - log policy (MiniLLM, arXiv 2306.08543, equation 3, without the term of later tokens;
    GKD, arXiv 2306.13649, with lambda 1). forward, KL(teacher ‖ policy): the probability ratio, bounded by `MAX_RATIO`, minus its mean 1,
    which reduces variance.
    """
    difference = teacher - behaviour
    return difference if kl == "reverse" else difference.clamp(max=math.log(MAX_RATIO)).exp() - 1


def candidate_kl(kl: Kl, policy: Tensor, rest: Tensor, teacher: Tensor) -> Tensor:
    """KL [T] over k candidate tokens, given as log-probs [T, k], and over all other tokens merged into one outcome.

    `rest` [T] is the policy's log-prob of the merged outcome. It is passed separately, because 1 minus the candidates loses precision if
    it is small. The result is at most the KL of the full distributions. Differentiable in `policy` and `rest`. reverse: KL(policy ‖
    teacher), forward: KL(teacher ‖ policy).
    """
    teacher = teacher.double()
    others = (1 - teacher.exp().sum(-1)).clamp(min=MIN_REST if kl == "reverse" else 0)
    if kl == "reverse":
        return (policy.exp() * (policy - teacher)).sum(-1) + rest.exp() * (rest - others.log())
    return (teacher.exp() * (teacher - policy)).sum(-1) + torch.xlogy(others, others) - others * rest
