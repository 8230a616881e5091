"""Advantages from the rewards of responses, of which several answer one prompt.

grpo                   (r - mean) / (std + 1e-6), std with n-1          DeepSeekMath (arXiv 2402.03300), section 4.1
grpo_no_std            r - mean                                         Dr. GRPO (arXiv 2503.20783): no favour to groups of low variance
rloo                   r - mean of the others = n/(n-1) (r - mean)      RLOO (arXiv 2402.14740)
reinforce_pp           (r - MEAN) / (STD + 1e-6)                        REINFORCE++ (arXiv 2501.03262)
reinforce_pp_baseline  the same of r - mean                             its variant with a baseline of the group

mean and std are those of the group. MEAN and STD are over all trained tokens of the batch, each with the value of its response, as the
paper has them over the advantages of tokens; STD is over n. The paper's plain variant also puts a KL penalty into the reward of each
token. Here the penalty is a term of the loss (`kl_coef` with the estimator k2), as in its variant with a baseline.

A group of one has no baseline, and gets 0, but for reinforce_pp.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Advantage = Literal["grpo", "grpo_no_std", "rloo", "reinforce_pp", "reinforce_pp_baseline"]

_EPS = 1e-6


def group_advantages(rewards: Tensor, groups: Tensor, kind: Advantage, lengths: Tensor) -> Tensor:
    """Advantage [N], in float64, of each response of a whole batch, over all micro-batches and ranks.

    `rewards` [N]; `groups` [N] integers, equal within a group (sizes may differ); `lengths` [N] trained tokens of each response.
    """
    _, group, size = torch.unique(groups, return_inverse=True, return_counts=True)
    value, count = rewards.double(), size.double()
    centred = value - (torch.zeros_like(count).index_add_(0, group, value) / count)[group]
    if kind in ("reinforce_pp", "reinforce_pp_baseline"):
        out = _over_tokens(value if kind == "reinforce_pp" else centred, lengths.double())
    elif kind == "grpo_no_std":
        out = centred
    elif kind == "rloo":
        out = centred * (count / (count - 1).clamp(min=1))[group]
    else:
        unit = _unit(centred)
        variance = torch.zeros_like(count).index_add_(0, group, (centred / unit) ** 2) / (count - 1).clamp(min=1)
        out = centred / (unit * variance.sqrt() + _EPS)[group]
    return out


def _over_tokens(value: Tensor, tokens: Tensor) -> Tensor:
    """The values [N] with mean 0 and deviation 1 over all tokens, of which each response has `tokens` [N]."""
    share = tokens / tokens.sum().clamp(min=1)
    centred = value - (share * value).sum()
    unit = _unit(centred)
    return centred / (unit * (share * (centred / unit) ** 2).sum().sqrt() + _EPS)


def _unit(values: Tensor) -> float:
    """A scale that keeps squares from overflowing. It is 1 for values of usual size, so that their results do not change."""
    largest = values.abs().max().item() if values.numel() else 0.0
    return largest if 1e100 < largest < math.inf else 1.0
