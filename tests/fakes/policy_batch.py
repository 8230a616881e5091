"""A packed batch for the policy loss, and its settings as the trainer reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from mtpctl.recipe.rl import RlConfig
from mtpctl.recipe.schema import Recipe
from mtpctl.rl.losses import LossInputs

LENGTHS = (4, 7, 5)


def rl_config(**settings: object) -> RlConfig:
    """`train.rl` with these settings, and with `correction.mode: auto` resolved."""
    return Recipe.model_validate({"train": {"rl": settings}}).rl


def batch(spread: float = 0.4) -> LossInputs:
    """Three packed responses in float64, each with two untrained tokens. `spread` scales the difference between the policies."""
    generator = torch.Generator().manual_seed(0)

    def noise() -> Tensor:
        return spread * torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64)

    seq = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))
    old = -torch.rand(sum(LENGTHS), generator=generator, dtype=torch.float64) - 0.1
    mask = torch.ones(sum(LENGTHS), dtype=torch.float64)
    mask[[0, 1, 4, 6, 11, 15]] = 0
    return LossInputs(
        logprob=(old + noise()).requires_grad_(),
        old_logprob=old,
        behaviour_logprob=old + noise(),
        advantage=torch.tensor([1.0, -0.7, 0.4], dtype=torch.float64)[seq],
        mask=mask,
        seq_ids=seq,
        num_sequences=3,
        entropy=torch.rand(sum(LENGTHS), generator=generator, dtype=torch.float64).requires_grad_(),
        ref_logprob=old + noise(),
    )
