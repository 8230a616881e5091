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
"""The least probability of all tokens that are not among the candidates, which rounding may make negative."""


def teacher_gain(kl: Kl, teacher: Tensor, behaviour: Tensor) -> Tensor:
    """The gain [T] whose policy gradient is that of the negative KL at each token, from log-probs in nats under teacher and policy.

    reverse, KL(policy ‖ teacher): log-prob of the teacher less the policy's (MiniLLM, arXiv 2306.08543, equation 3, without the part of
    later tokens; GKD, arXiv 2306.13649, at a lambda of 1). forward, KL(teacher ‖ policy): the ratio of their probabilities, to at most
    `MOST`, less 1, which is its mean and takes variance away.
    """
    apart = teacher - behaviour
    return apart if kl == "reverse" else apart.clamp(max=math.log(MOST)).exp() - 1


def candidate_kl(kl: Kl, policy: Tensor, teacher: Tensor) -> Tensor:
    """The KL [T] of two distributions over k candidates [T, k], given as log-probs, and over all other tokens taken as one.

    It is at most that of the whole distributions, and 0 where candidates and rest have the teacher's probabilities. Differentiable by
    `policy`. reverse: KL(policy ‖ teacher), forward: KL(teacher ‖ policy).
    """
    rest, taught = (_rest(each) for each in (policy, teacher))
    policy, teacher = torch.cat([policy, rest], -1), torch.cat([teacher, taught], -1)
    if kl == "reverse":
        return (policy.exp() * (policy - teacher)).sum(-1)
    return (teacher.exp() * (teacher - policy)).sum(-1)


def _rest(logprobs: Tensor) -> Tensor:
    """Log-prob [T, 1] of all tokens that are not among the candidates."""
    return (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=LEAST).log()
