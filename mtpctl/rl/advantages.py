"""Advantages from the rewards of groups of responses.

grpo                   (r - mean) / (std + 1e-6), std with n-1          DeepSeekMath (arXiv 2402.03300), section 4.1
grpo_no_std            r - mean                                         Dr. GRPO (arXiv 2503.20783): no bias to groups of low variance
rloo                   r - mean of the others = n/(n-1) (r - mean)      RLOO (arXiv 2402.14740)
reinforce_pp           (r - MEAN) / (STD + 1e-6)                        REINFORCE++ (arXiv 2501.03262)
reinforce_pp_baseline  reinforce_pp applied to r - mean                 its variant with a group baseline

mean and std are computed within the group. MEAN and STD (dividing by n) are computed over all trained tokens of the batch; each token has
the value of its response. The paper's plain REINFORCE++ also subtracts a KL penalty from the reward of each token. Here the penalty is a
loss term (`kl_coef` with the estimator k2), as in the paper's variant with a baseline.

A group of one response has no baseline: its r - mean is 0. Its advantage is therefore 0, except with reinforce_pp, and with
reinforce_pp_baseline if MEAN is not 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mtpctl.recipe.rl import OverlongConfig

_EPS = 1e-6


def group_advantages(rewards: Tensor, groups: Tensor, kind: str, lengths: Tensor) -> Tensor:
    """Float64 advantages [N] of all responses of a batch, across microbatches and ranks.

    Args:
        rewards: [N].
        groups: [N] integers, equal within a group. Group sizes may differ.
        kind: a name in `mtpctl.recipe.rl.ADVANTAGES`.
        lengths: [N] number of trained tokens of each response.
    """
    _, group, size = torch.unique(groups, return_inverse=True, return_counts=True)
    value, count = rewards.double(), size.double()
    centered = value - (torch.zeros_like(count).index_add_(0, group, value) / count)[group]
    match kind:
        case "grpo":
            scale = _scale(centered)
            variance = torch.zeros_like(count).index_add_(0, group, (centered / scale) ** 2) / (count - 1).clamp(min=1)
            return centered / (scale * variance.sqrt() + _EPS)[group]
        case "grpo_no_std":
            return centered
        case "rloo":
            return centered * (count / (count - 1).clamp(min=1))[group]
        case "reinforce_pp":
            return _normalize_over_tokens(value, lengths.double())
        case "reinforce_pp_baseline":
            return _normalize_over_tokens(centered, lengths.double())
    raise AssertionError(f"unknown advantage {kind}")


def _normalize_over_tokens(value: Tensor, tokens: Tensor) -> Tensor:
    """Normalize `value` [N] to mean 0 and standard deviation 1 over all tokens. `tokens` [N]: tokens of each response."""
    share = tokens / tokens.sum().clamp(min=1)
    centered = value - (share * value).sum()
    scale = _scale(centered)
    return centered / (scale * (share * (centered / scale) ** 2).sum().sqrt() + _EPS)


def _scale(values: Tensor) -> float:
    """Scale that prevents squares from overflowing: the largest absolute value if it exceeds 1e100, else 1."""
    largest = values.abs().max().item() if values.numel() else 0.0
    return largest if 1e100 < largest < math.inf else 1.0


def overlong_penalty(length: int, max_tokens: int, config: OverlongConfig) -> float:
    """Reward offset, from -penalty to 0, of a response of `length` tokens.

    DAPO's soft overlong punishment (arXiv 2503.14476, equation 13): 0 up to max_tokens - buffer, then linear to -penalty at max_tokens.
    """
    if not config.enabled:
        return 0.0
    excess = length - (max_tokens - config.buffer)
    return -config.penalty * min(max(excess / config.buffer, 0.0), 1.0)
