"""The mismatch between the policy that sampled the tokens (behaviour) and the one they are trained against (old), as `rollout_corr/*`.

With d = log p_old - log p_behaviour, ρ = exp(d), and w the weight of the correction, over the trained tokens:

kl               mean of -d: estimate of KL(behaviour ‖ old)
k3               mean of ρ - 1 - d: another estimate of it, never negative
abs_diff         mean of |d|
chi2             mean of ρ² - 1: estimate of χ²(old ‖ behaviour), the variance of unbounded importance weights
ppl_ratio        mean over responses of perplexity(old) / perplexity(behaviour)
ess              (Σw)² / (n Σw²): effective share of the n tokens, 1 where all weights are equal
is_mean          mean of w
masked_fraction  share of tokens that the correction dropped

kl, k3, abs_diff and chi2 are means over tokens; ess, is_mean and masked_fraction are of the level of the correction, token or sequence.
With the correction off, w = ρ.

Where old log-probs are recomputed, `mismatch_sums` compares them with the behaviour log-probs of the whole batch. Where the behaviour
log-probs are themselves the anchor of the loss, nothing is recomputed: the loss compares them token by token with the log-probs that it
computes (`token_mismatch`), which gives kl, k3, abs_diff and chi2.

abs_diff_same_version is the mean of |d| over the tokens that were sampled under the very weights of `old`: there d is the numerical
difference between the two engines.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mtpctl.recipe.rl import CorrectionConfig
from mtpctl.rl.corrections import correction_weights
from mtpctl.rl.limits import MAX_LOG_RATIO
from mtpctl.rl.segments import sequence_mean, sequence_sum


@torch.no_grad()
def mismatch_sums(
    old_logprob: Tensor,
    behaviour_logprob: Tensor,
    mask: Tensor,
    seq_ids: Tensor,
    num_sequences: int,
    config: CorrectionConfig,
) -> dict[str, Tensor]:
    """Sums over one packed batch of T tokens, as float64 scalars; sums of several batches are added up for `mismatch_metrics`."""
    keep = mask.double()
    d = _log_ratio(old_logprob, behaviour_logprob, mask.bool())
    correction = correction_weights(old_logprob.double(), behaviour_logprob.double(), mask, seq_ids, num_sequences, config)
    weight = correction.weight * keep
    trained = (sequence_sum(keep, seq_ids, num_sequences) > 0).double()  # 1 for each response with a trained token
    log_ppl_ratio = sequence_mean(-d, keep, seq_ids, num_sequences)
    return {
        **_token_sums(d, keep),
        "sequences": trained.sum(),
        "ppl_ratio": (log_ppl_ratio.exp() * trained).sum(),
        "weight": weight.sum(),
        "weight_squared": (weight**2).sum(),
        "masked": correction.masked.double().sum(),
    }


def mismatch_metrics(sums: Mapping[str, Tensor | float]) -> dict[str, float]:
    """`rollout_corr/*` from the sums of all batches. Raises ValueError where they are over no token."""
    s = {name: float(value) for name, value in sums.items()}
    tokens = s["tokens"]
    if tokens <= 0:
        raise ValueError("mismatch of no tokens")
    return {
        **_token_metrics(s),
        "rollout_corr/ppl_ratio": s["ppl_ratio"] / s["sequences"],
        "rollout_corr/ess": s["weight"] ** 2 / (tokens * s["weight_squared"]) if s["weight_squared"] > 0 else 0.0,
        "rollout_corr/is_mean": s["weight"] / tokens,
        "rollout_corr/masked_fraction": s["masked"] / tokens,
    }


@torch.no_grad()
def token_mismatch(logprob: Tensor, behaviour_logprob: Tensor, trained: Tensor, same_weights: Tensor) -> dict[str, Tensor]:
    """Sums over any slice of tokens [T], as float64 scalars; sums of several slices are added up for `token_mismatch_metrics`."""
    d = _log_ratio(logprob, behaviour_logprob, trained)
    same = torch.where(trained, same_weights.double(), 0.0)
    sums = _token_sums(d, trained.double()) | {"same": same.sum(), "same_abs_diff": (d.abs() * same).sum()}
    return {f"mismatch/{name}": value for name, value in sums.items()}


def token_mismatch_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """`rollout_corr/*` from the sums of `token_mismatch`; empty where `sums` holds none of them."""
    s = {name.removeprefix("mismatch/"): value for name, value in sums.items() if name.startswith("mismatch/")}
    if not s.get("tokens"):
        return {}
    metrics = _token_metrics(s)
    if s["same"]:
        metrics["rollout_corr/abs_diff_same_version"] = s["same_abs_diff"] / s["same"]
    return metrics


def _log_ratio(old_logprob: Tensor, behaviour_logprob: Tensor, trained: Tensor) -> Tensor:
    """d by token [T] in float64, 0 where not trained."""
    return torch.where(trained, (old_logprob - behaviour_logprob).double(), 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _token_sums(d: Tensor, keep: Tensor) -> dict[str, Tensor]:
    return {
        "tokens": keep.sum(),
        "kl": (-d * keep).sum(),
        "k3": ((torch.expm1(d) - d) * keep).sum(),
        "abs_diff": (d.abs() * keep).sum(),
        "ratio_squared": (d.exp() ** 2 * keep).sum(),
    }


def _token_metrics(s: Mapping[str, float]) -> dict[str, float]:
    metrics = {f"rollout_corr/{name}": s[name] / s["tokens"] for name in ("kl", "k3", "abs_diff")}
    return metrics | {"rollout_corr/chi2": s["ratio_squared"] / s["tokens"] - 1}
