"""Surrogates of the policy objective: what a token adds to the loss, before weights and aggregation, as a function of its own log-prob.

With r = exp(log_ratio) and A the advantage:

clipped           max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))              PPO; clip-higher: DAPO (arXiv 2503.14476)
                  for A < 0 and clip_dual = c > 0: min(that, -A c)                dual clip (arXiv 1912.09729)
weighted_logprob  -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log π               CISPO: MiniMax-M1 (arXiv 2506.13585), equations 4 and 5
soft_gate         -A 4/τ sigmoid(τ (r - 1)), τ = tau_pos for A > 0, else tau_neg  SAPO (arXiv 2511.20347)

sg stops the gradient. Under the clip of PPO a token whose ratio has left the band has no gradient; under CISPO it has one of bounded
weight; under SAPO its weight, r · 4 p (1 - p) with p = sigmoid(τ (r - 1)), fades with the distance of r from 1. On policy all three have
the gradient -A ∇log π. Shapes: all [t]. Sums are over trained tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mtpctl.recipe.rl import RlConfig


class Surrogate(NamedTuple):
    """`value` [t] carries the gradient; `sums` are detached scalars, the same names for every slice of tokens."""

    value: Tensor
    sums: dict[str, Tensor]


def clipped(log_ratio: Tensor, advantage: Tensor, trained: Tensor, config: RlConfig) -> Surrogate:
    """PPO's surrogate, with one clip for each side and the dual clip."""
    ratio = log_ratio.exp()
    free = -advantage * ratio
    bounded = -advantage * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    value = torch.maximum(free, bounded)
    dual = torch.zeros_like(trained)
    if config.clip_dual:
        ceiling = -advantage * config.clip_dual
        dual = trained & (advantage < 0) & (value > ceiling)
        value = torch.where(advantage < 0, torch.minimum(value, ceiling), value)
    cut = trained & (bounded > free)
    sums = {"clip_low": (cut & (advantage < 0)).sum(), "clip_high": (cut & (advantage > 0)).sum(), "clip_dual": dual.sum()}
    return Surrogate(value, sums)


def weighted_logprob(logprob: Tensor, log_ratio: Tensor, advantage: Tensor, trained: Tensor, config: RlConfig) -> Surrogate:
    """CISPO's surrogate: every token keeps a gradient, with a bounded importance weight."""
    ratio = log_ratio.detach().exp()
    low, high = 1 - config.clip_low, 1 + config.clip_high
    value = -ratio.clamp(low, high) * advantage * torch.where(trained, logprob, 0.0)
    return Surrogate(value, {"clip_low": (trained & (ratio < low)).sum(), "clip_high": (trained & (ratio > high)).sum()})


def soft_gate(log_ratio: Tensor, advantage: Tensor, trained: Tensor, config: RlConfig) -> Surrogate:
    """SAPO's surrogate. Its sum `gate` is that of 4 p (1 - p), which is 1 on policy and 0 far from it."""
    tau = torch.where(advantage > 0, config.tau_pos, config.tau_neg).to(log_ratio.dtype)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1))
    passed = (4 * gate * (1 - gate)).detach()
    return Surrogate(-advantage * gate * 4 / tau, {"gate": (passed * trained).sum()})
