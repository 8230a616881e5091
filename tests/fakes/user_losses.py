"""User-defined losses and advantages: valid ones, and common mistakes."""

from __future__ import annotations

import torch
from torch import Tensor

from mtpctl.recipe.rl import RlConfig
from mtpctl.rl.losses import LossOut, TokenTerms, log_ratio_of, loss_from, token_policy_loss


def squared(logprob: Tensor, entropy: Tensor | None, terms: TokenTerms, config: RlConfig, weight: float = 0.5) -> LossOut:
    """Ratio times advantage, with a penalty on the log-ratio instead of a clip."""
    log_ratio = log_ratio_of(logprob, terms)
    surrogate = -terms.advantage * log_ratio.exp() + weight * log_ratio**2
    far = ((log_ratio.detach().abs() > 0.2) & (terms.aggregation > 0)).sum()
    return loss_from(surrogate, logprob, entropy, terms, config, {"far": far})


def plain(logprob: Tensor, entropy: Tensor | None, terms: TokenTerms, config: RlConfig) -> LossOut:
    """REINFORCE without `loss_from`."""
    retained = torch.where(terms.aggregation > 0, logprob, 0.0)
    return LossOut(-(terms.advantage * terms.aggregation * retained).sum(), {})


def built_in(logprob: Tensor, entropy: Tensor | None, terms: TokenTerms, config: RlConfig, **arguments: object) -> LossOut:
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


def leave_one_out(rewards: Tensor, groups: Tensor, lengths: Tensor, scale: float = 1.0) -> Tensor:
    """RLOO by loops."""
    result = []
    for index, group in enumerate(groups):
        others = (groups == group) & (torch.arange(len(groups)) != index)
        result.append(scale * (rewards[index] - rewards[others].mean()))
    return torch.stack(result)


def advantage_raises(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    return rewards[10]


def advantage_list(rewards: Tensor, groups: Tensor, lengths: Tensor) -> list[float]:
    return rewards.tolist()  # type: ignore[no-any-return]


def advantage_per_group(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    return torch.zeros(len(groups.unique()))


def advantage_divides(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    centered = torch.stack([reward - rewards[groups == group].mean() for reward, group in zip(rewards, groups, strict=True)])
    return centered / torch.stack([rewards[groups == group].std() for group in groups])


def advantage_in_place(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    return rewards.sub_(rewards.mean())


NOT_A_FUNCTION = 3
