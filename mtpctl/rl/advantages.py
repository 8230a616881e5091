"""Advantages from the rewards of a group of responses to one prompt.

grpo          (r - mean) / (std + 1e-6), std with n-1          DeepSeekMath (arXiv 2402.03300), section 4.1
grpo_no_std   r - mean                                         Dr. GRPO (arXiv 2503.20783): no favour to groups of low variance
rloo          r - mean of the others = n/(n-1) (r - mean)      RLOO (arXiv 2402.14740)

A group of one has no baseline, and gets 0.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

_EPS = 1e-6


def group_advantages(rewards: Tensor, groups: Tensor, kind: Literal["grpo", "grpo_no_std", "rloo"]) -> Tensor:
    """Advantage [N] of each response; `rewards` [N], `groups` [N] integers, equal within a group (sizes may differ)."""
    _, group, size = torch.unique(groups, return_inverse=True, return_counts=True)
    value, count = rewards.double(), size.double()
    centred = value - (torch.zeros_like(count).index_add_(0, group, value) / count)[group]
    if kind == "grpo_no_std":
        out = centred
    elif kind == "rloo":
        out = centred * (count / (count - 1).clamp(min=1))[group]
    else:
        variance = torch.zeros_like(count).index_add_(0, group, centred**2) / (count - 1).clamp(min=1)
        out = centred / (variance.sqrt() + _EPS)[group]
    return out.to(rewards.dtype if rewards.is_floating_point() else torch.float32)
