"""Losses as a user writes them: one that is right, and the mistakes that one makes first."""

from __future__ import annotations

import torch
from torch import Tensor

from mtpctl.recipe.rl import RlConfig
from mtpctl.rl.losses import LossOut, TokenTerms, log_ratio_of, loss_from, token_policy_loss


def squared(logprob: Tensor, entropy: Tensor | None, terms: TokenTerms, config: RlConfig, weight: float = 0.5) -> LossOut:
    """The ratio times the advantage, with a penalty for leaving the anchor in place of a clip."""
    log_ratio = log_ratio_of(logprob, terms)
    surrogate = -terms.advantage * log_ratio.exp() + weight * log_ratio**2
    far = ((log_ratio.detach().abs() > 0.2) & (terms.aggregation > 0)).sum()
    return loss_from(surrogate, logprob, entropy, terms, config, {"far": far})


def plain(logprob: Tensor, entropy: Tensor | None, terms: TokenTerms, config: RlConfig) -> LossOut:
    """REINFORCE, summed by hand."""
    kept = torch.where(terms.aggregation > 0, logprob, 0.0)
    return LossOut(-(terms.advantage * terms.aggregation * kept).sum(), {})


def ours(logprob: Tensor, entropy: Tensor | None, terms: TokenTerms, config: RlConfig, **arguments: object) -> LossOut:
    return token_policy_loss(logprob, entropy, terms, config)


def raises(logprob: Tensor, entropy: Tensor | None, terms: TokenTerms, config: RlConfig) -> LossOut:
    return LossOut((logprob - terms.old_logprob).sum(), {})  # type: ignore[attr-defined]


def mean(logprob: Tensor, entropy: Tensor | None, terms: TokenTerms, config: RlConfig) -> LossOut:
    return LossOut(-(terms.advantage * terms.aggregation * logprob).sum() / max(len(logprob), 1), {})


def by_batch(logprob: Tensor, entropy: Tensor | None, terms: TokenTerms, config: RlConfig) -> LossOut:
    advantage = terms.advantage - terms.advantage.sum() / max(len(logprob), 1)
    return LossOut(-(advantage * terms.aggregation * logprob).sum(), {})


def unmasked(logprob: Tensor, entropy: Tensor | None, terms: TokenTerms, config: RlConfig) -> LossOut:
    return LossOut(-(terms.advantage * logprob).sum(), {})


def detached(logprob: Tensor, entropy: Tensor | None, terms: TokenTerms, config: RlConfig) -> LossOut:
    return LossOut(-(terms.advantage * terms.aggregation * logprob.detach()).sum(), {})


def not_a_number(logprob: Tensor, entropy: Tensor | None, terms: TokenTerms, config: RlConfig) -> LossOut:
    return LossOut((logprob * terms.aggregation).log().sum(), {})


def no_gradient_at_0(logprob: Tensor, entropy: Tensor | None, terms: TokenTerms, config: RlConfig) -> LossOut:
    return LossOut((terms.advantage * logprob * terms.aggregation).abs().sqrt().sum(), {})


def per_token(logprob: Tensor, entropy: Tensor | None, terms: TokenTerms, config: RlConfig) -> LossOut:
    return LossOut(-terms.advantage * terms.aggregation * logprob, {})


def a_tensor(logprob: Tensor, entropy: Tensor | None, terms: TokenTerms, config: RlConfig) -> Tensor:
    return -(terms.advantage * terms.aggregation * logprob).sum()


def a_float(logprob: Tensor, entropy: Tensor | None, terms: TokenTerms, config: RlConfig) -> LossOut:
    return LossOut(-(terms.advantage * terms.aggregation * logprob).sum(), {"mine": 1.0})  # type: ignore[dict-item]


def changing_names(logprob: Tensor, entropy: Tensor | None, terms: TokenTerms, config: RlConfig) -> LossOut:
    sums = {"any": logprob.detach().sum()} if len(logprob) else {}
    return LossOut(-(terms.advantage * terms.aggregation * logprob).sum(), sums)


def old_signature(logprob: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    return -(advantage * (logprob - old).exp()).sum()


NOT_A_FUNCTION = 3
