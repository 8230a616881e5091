"""Off-policy correction: importance weights for tokens that the rollout engine sampled under one policy (behaviour) and that
the loss treats as samples of another one (old).

The importance ratio is ρ = p_old / p_behaviour, of the token, or of its whole response (the product over its tokens). A token's weight is


truncate   min(ρ, high)                         TIS (https://fengyao.notion.site/off-policy-rl)
clip       min(max(ρ, low), high)
mask       ρ where low <= ρ <= high, else 0     IcePop (arXiv 2510.18855) by token, MIS
                                                (https://yingru.notion.site/When-Speed-Kills-Stability) by sequence

Weights carry no gradient. Tokens that a mask drops still count in the denominator of the loss, which is fixed before the weights
are known: dropping tokens makes the update smaller, and leaves the weight of the remaining tokens as it is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mtpctl.recipe.rl import CorrectionConfig
from mtpctl.rl.limits import MAX_LOG_RATIO
from mtpctl.rl.segments import sequence_sum


class Correction(NamedTuple):
    """Per token [T]: `ratio` is ρ before the bounds, `weight` ρ after them; `masked` is True where the weight was set to zero."""

    ratio: Tensor
    weight: Tensor
    masked: Tensor


@torch.no_grad()
def correction_weights(
    old_logprob: Tensor,
    behaviour_logprob: Tensor,
    mask: Tensor,
    seq_ids: Tensor,
    num_sequences: int,
    config: CorrectionConfig,
) -> Correction:
    """Importance weights of a packed batch: log-probs, mask and `seq_ids` [T], with S = `num_sequences`.

    Where the mask is 0 the ratio is 1. With the mode off the weight is ρ, unbounded.
    """
    log_ratio = torch.where(mask.bool(), old_logprob.detach() - behaviour_logprob, 0.0)
    if config.level == "sequence":
        log_ratio = sequence_sum(log_ratio, seq_ids, num_sequences)[seq_ids]
    ratio = torch.where(mask.bool(), log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), 1.0)
    nothing = torch.zeros_like(ratio, dtype=torch.bool)
    if config.mode == "truncate":
        return Correction(ratio, ratio.clamp(max=config.high), nothing)
    if config.mode == "clip":
        return Correction(ratio, ratio.clamp(config.low, config.high), nothing)
    if config.mode == "mask":
        masked = ((ratio < config.low) | (ratio > config.high)) & mask.bool()
        return Correction(ratio, ratio.masked_fill(masked, 0.0), masked)
    return Correction(ratio, ratio, nothing)
