"""Off-policy correction: importance weights for tokens sampled under one policy (behaviour) and trained as samples of another (old).

The importance ratio is ρ = p_old / p_behaviour, of a token or of its whole response (the product over its tokens). The weight of a token:

truncate   min(ρ, high)                         TIS (https://fengyao.notion.site/off-policy-rl)
clip       min(max(ρ, low), high)
mask       ρ if low <= ρ <= high, else 0        IcePop (arXiv 2510.18855) per token; MIS
                                                (https://yingru.notion.site/When-Speed-Kills-Stability) per sequence

Weights carry no gradient. Masked tokens still count in the denominator of the loss, which is fixed before the weights are known. Masking
therefore makes the update smaller and does not change the weight of the remaining tokens.

The mismatch between the two policies is logged as `rollout_corr/*`, over the trained tokens. d = log p_old - log p_behaviour, ρ = exp(d),
and w is the weight of the correction, or ρ if the mode is off:

kl               mean of -d: estimate of KL(behaviour ‖ old)
k3               mean of ρ - 1 - d: a nonnegative estimate of the same KL
abs_diff         mean of |d|
chi2             mean of ρ² - 1: estimate of χ²(old ‖ behaviour), the variance of unbounded importance weights
ppl_ratio        mean over responses of perplexity(old) / perplexity(behaviour)
ess              (Σw)² / (n Σw²): effective share of the n tokens, 1 if all weights are equal
is_mean          mean of w
masked_fraction  share of masked tokens

The difference has three causes: different weights, a KV cache of earlier weights (`sync.kv: keep`), and the numerics of the two engines.
abs_diff includes all of them. The last two are measured on the tokens that were sampled under the same weights as `old`:

abs_diff_same_version  mean of |d| over the tokens whose KV cache has the same weights: numerics
abs_diff_stale_kv      mean of |d| over the tokens whose KV cache has earlier weights
stale_kv_fraction      share of all trained tokens, of any version, whose KV cache had earlier weights

If old log-probs are recomputed, `mismatch_sums` compares them with the behaviour log-probs of the whole batch. If behaviour log-probs are
the anchor of the loss, nothing is recomputed: the loss compares them with its own log-probs (`token_mismatch`), which gives kl, k3,
abs_diff, chi2 and the metrics by cause.

Shapes: T tokens of S packed sequences; `seq_ids` [T] holds 0 … S-1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from mtpctl.recipe.rl import CorrectionConfig

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this before `exp`: e²⁰ = 4.9e8 exceeds every clip bound, and its square fits in fp32."""


def sequence_sum(values: Tensor, seq_ids: Tensor, num_sequences: int) -> Tensor:
    """Sum over each sequence: [T] to [S]."""
    return torch.zeros(num_sequences, dtype=values.dtype, device=values.device).index_add_(0, seq_ids, values)


def sequence_mean(values: Tensor, mask: Tensor, seq_ids: Tensor, num_sequences: int) -> Tensor:
    """Mean of each sequence over its tokens with mask 1: [T] to [S]. It is 0 for a sequence without such tokens."""
    total = sequence_sum(values * mask, seq_ids, num_sequences)
    return total / sequence_sum(mask.to(values.dtype), seq_ids, num_sequences).clamp(min=1)


class Correction(NamedTuple):
    """Per token [T]: `weight` is ρ after the mode's bound; `masked` is True if `mode: mask` set the weight to 0."""

    weight: Tensor
    masked: Tensor


@torch.no_grad()
def correction_weights(
    old_logprob: Tensor, behaviour_logprob: Tensor, mask: Tensor, seq_ids: Tensor, num_sequences: int, config: CorrectionConfig
) -> Correction:
    """Importance weights of a packed batch. Log-probs, mask and `seq_ids` are [T], and S = `num_sequences`.

    Tokens whose mask is 0 have ratio 1. With the mode `off` the weight is ρ, unbounded.

    Raises ValueError for the mode `auto`, which `Recipe.rl` resolves.
    """
    log_ratio = torch.where(mask.bool(), old_logprob.detach() - behaviour_logprob, 0.0)
    if config.level == "sequence":
        log_ratio = sequence_sum(log_ratio, seq_ids, num_sequences)[seq_ids]
    ratio = torch.where(mask.bool(), log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), 1.0)
    none_masked = torch.zeros_like(ratio, dtype=torch.bool)
    match config.mode:
        case "auto":
            raise ValueError("train.rl.correction.mode: auto is not resolved; use Recipe.rl instead of train.rl")
        case "off":
            return Correction(ratio, none_masked)
        case "truncate":
            return Correction(ratio.clamp(max=config.high), none_masked)
        case "clip":
            return Correction(ratio.clamp(config.low, config.high), none_masked)
        case "mask":
            masked = ((ratio < config.low) | (ratio > config.high)) & mask.bool()
            return Correction(ratio.masked_fill(masked, 0.0), masked)


@torch.no_grad()
def mismatch_sums(
    old_logprob: Tensor, behaviour_logprob: Tensor, mask: Tensor, seq_ids: Tensor, num_sequences: int, config: CorrectionConfig
) -> dict[str, Tensor]:
    """Sums over one packed batch, as float64 scalars. Add up the sums of several batches for `mismatch_metrics`."""
    trained = mask.double()
    d = _log_ratio(old_logprob, behaviour_logprob, mask.bool())
    correction = correction_weights(old_logprob.double(), behaviour_logprob.double(), mask, seq_ids, num_sequences, config)
    weight = correction.weight * trained
    has_trained = (sequence_sum(trained, seq_ids, num_sequences) > 0).double()  # [S]
    log_ppl_ratio = sequence_mean(-d, trained, seq_ids, num_sequences)
    return {
        **_token_sums(d, trained),
        "sequences": has_trained.sum(),
        "ppl_ratio": (log_ppl_ratio.exp() * has_trained).sum(),
        "weight": weight.sum(),
        "weight_squared": (weight**2).sum(),
        "masked": correction.masked.double().sum(),
    }


def mismatch_metrics(sums: Mapping[str, Tensor | float]) -> dict[str, float]:
    """`rollout_corr/*` from the sums of all batches. Raises ValueError if they cover no token."""
    s = {name: float(value) for name, value in sums.items()}
    tokens = s["tokens"]
    if tokens <= 0:
        raise ValueError("the mismatch needs at least one token")
    return {
        **_token_metrics(s),
        "rollout_corr/ppl_ratio": s["ppl_ratio"] / s["sequences"],
        "rollout_corr/ess": s["weight"] ** 2 / (tokens * s["weight_squared"]) if s["weight_squared"] > 0 else 0.0,
        "rollout_corr/is_mean": s["weight"] / tokens,
        "rollout_corr/masked_fraction": s["masked"] / tokens,
    }


@torch.no_grad()
def cause_sums(
    old_logprob: Tensor, behaviour_logprob: Tensor, mask: Tensor, same_weights: Tensor, stale_kv: Tensor | None
) -> dict[str, Tensor]:
    """Sums of the differences by cause, as float64 scalars, for `cause_metrics`. Arguments are [T].

    `same_weights`: 1 for tokens that were sampled under the weights of `old_logprob`. `stale_kv`: 1 for tokens that were sampled with a
    stale KV cache; None if there are none.
    """
    trained = mask.double()
    abs_diff = _log_ratio(old_logprob, behaviour_logprob, mask.bool()).abs()
    stale = torch.zeros_like(trained) if stale_kv is None else stale_kv.double()
    same = same_weights.double() * trained
    return {
        "same": (same * (1 - stale)).sum(),
        "same_abs_diff": (abs_diff * same * (1 - stale)).sum(),
        "same_stale": (same * stale).sum(),
        "same_stale_abs_diff": (abs_diff * same * stale).sum(),
        "stale": (stale * trained).sum(),
    }


def cause_metrics(s: Mapping[str, float], *, tokens: float) -> dict[str, float]:
    """The metrics by cause; a metric that covers no token is omitted. `tokens`: number of trained tokens."""
    metrics = {}
    if s["same"]:
        metrics["rollout_corr/abs_diff_same_version"] = s["same_abs_diff"] / s["same"]
    if s["same_stale"]:
        metrics["rollout_corr/abs_diff_stale_kv"] = s["same_stale_abs_diff"] / s["same_stale"]
    if s["stale"]:
        metrics["rollout_corr/stale_kv_fraction"] = s["stale"] / tokens
    return metrics


@torch.no_grad()
def token_mismatch(
    logprob: Tensor, behaviour_logprob: Tensor, trained: Tensor, same_weights: Tensor, stale_kv: Tensor | None = None
) -> dict[str, Tensor]:
    """Sums over any slice of tokens, as float64 scalars. Add up the sums of several slices for `token_mismatch_metrics`."""
    sums = _token_sums(_log_ratio(logprob, behaviour_logprob, trained), trained.double())
    sums |= cause_sums(logprob, behaviour_logprob, trained, same_weights, stale_kv)
    return {f"mismatch/{name}": value for name, value in sums.items()}


def token_mismatch_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """`rollout_corr/*` from the sums of `token_mismatch`; empty if they are missing or cover no token."""
    s = {name.removeprefix("mismatch/"): value for name, value in sums.items() if name.startswith("mismatch/")}
    if not s.get("tokens"):
        return {}
    return _token_metrics(s) | cause_metrics(s, tokens=s["tokens"])


def _log_ratio(old_logprob: Tensor, behaviour_logprob: Tensor, trained: Tensor) -> Tensor:
    """d per token [T] in float64; 0 for tokens that are not trained."""
    return torch.where(trained, (old_logprob - behaviour_logprob).double(), 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _token_sums(d: Tensor, trained: Tensor) -> dict[str, Tensor]:
    return {
        "tokens": trained.sum(),
        "kl": (-d * trained).sum(),
        "k3": ((torch.expm1(d) - d) * trained).sum(),
        "abs_diff": (d.abs() * trained).sum(),
        "ratio_squared": (d.exp() ** 2 * trained).sum(),
    }


def _token_metrics(s: Mapping[str, float]) -> dict[str, float]:
    metrics = {f"rollout_corr/{name}": s[name] / s["tokens"] for name in ("kl", "k3", "abs_diff")}
    return metrics | {"rollout_corr/chi2": s["ratio_squared"] / s["tokens"] - 1}
