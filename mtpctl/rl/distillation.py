"""On-policy distillation: what a policy learns from a teacher at the tokens that it sampled itself."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Kl = Literal["reverse", "forward"]
MOST = 10.0
"""Bound of the ratio of the teacher's probability to the policy's in the forward KL, which is unbounded for tokens that hardly occur."""
LEAST = 1e-6
"""Minimum of the teacher's total probability outside its candidates, in the reverse KL, which is unbounded there. With fp32 log-probs a
smaller value is rounding error, and may be negative."""


def teacher_gain(kl: Kl, teacher: Tensor, behaviour: Tensor) -> Tensor:
    """The gain [T] whose policy gradient is that of the negative KL at each token, from log-probs in nats under teacher and policy.

    reverse, KL(policy ‖ teacher): log-prob of the teacher less the policy's (MiniLLM, arXiv 2306.08543, equation 3, without the part of
    later tokens; GKD, arXiv 2306.13649, at a lambda of 1). forward, KL(teacher ‖ policy): the ratio of their probabilities, to at most
    `MOST`, less 1, which is its mean and takes variance away.
    """
    apart = teacher - behaviour
    return apart if kl == "reverse" else apart.clamp(max=math.log(MOST)).exp() - 1


def candidate_kl(kl: Kl, policy: Tensor, rest: Tensor, teacher: Tensor) -> Tensor:
    """The KL [T] of two distributions over k candidates [T, k], given as log-probs, and over all other tokens taken as one.

    `rest` [T]: the policy's log-prob of these. It is passed separately, because 1 minus the candidates loses precision if it is small.
    The KL is at most that of the whole distributions, and 0 where candidates and rest have the teacher's probabilities. Differentiable by
    `policy` and `rest`. reverse: KL(policy ‖ teacher), forward: KL(teacher ‖ policy).
    """
    teacher = teacher.double()
    others = (1 - teacher.exp().sum(-1)).clamp(min=LEAST if kl == "reverse" else 0)
    if kl == "reverse":
        return (policy.exp() * (policy - teacher)).sum(-1) + rest.exp() * (rest - others.log())
    return (teacher.exp() * (teacher - policy)).sum(-1) + torch.xlogy(others, others) - others * rest
