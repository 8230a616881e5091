"""Off-policy correction: tokens were sampled by the rollout engine (behaviour), and are trained on as if by another policy (old).

The weight of a token is ρ = old/behaviour, of the token, or of its whole response (the product over its tokens):

truncate   min(ρ, high)                         TIS (https://fengyao.notion.site/off-policy-rl)
clip       min(max(ρ, low), high)
mask       ρ where low <= ρ <= high, else 0     IcePop (arXiv 2510.18855) by token, MIS
                                                (https://yingru.notion.site/When-Speed-Kills-Stability) by sequence

Weights are constants to the optimizer. What a mask drops still counts in the loss's denominator, which is known before
the weights are: dropping tokens makes a step smaller, never the remaining tokens louder.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mtpctl.recipe.rl import CorrectionConfig
from mtpctl.rl.limits import MAX_LOG_RATIO
from mtpctl.rl.segments import Reduce, sequence_sum


class Correction(NamedTuple):
    """Per token [T]: `ratio` ρ as it is, `weight` after the bounds, `masked` where the weight was set to zero."""

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
    reduce: Reduce | None = None,
) -> Correction:
    """Weights of the tokens of a packed batch; where the mask is 0 the ratio is 1, and where the mode is off the weight is ρ."""
    log_ratio = torch.where(mask.bool(), old_logprob.detach() - behaviour_logprob, 0.0)
    if config.level == "sequence":
        log_ratio = sequence_sum(log_ratio, seq_ids, num_sequences, reduce)[seq_ids]
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
