"""The policy loss on packed tokens, in two parts, so that a fused kernel may do the second.

`token_terms` computes the constants of each token, among them everything that depends on a whole response.
`token_policy_loss` is then separable: the loss of a token depends on its own log-prob (and entropy) and on its constants,
so a kernel can evaluate and differentiate it chunk by chunk, where it computes the log-probs.

With r = exp(logprob - anchor), A the advantage, w the weight, a the aggregation weight:

    loss      = a (w surrogate - entropy_coef · entropy + kl_coef · kl)

and the surrogate of `rl.surrogates`: clipped for ppo, decoupled and gspo, or that of cispo or sapo. The anchor is the old log-prob, and w
is the correction of old against behaviour, 1 with the correction off. Two losses have others:

decoupled   w = old/behaviour always, bounded as the correction says (off: not at all). Old is the
            proximal policy here: Hilton et al. (arXiv 2110.00641), as in AReaL (arXiv 2505.24298)
gspo        r = (π/old)^(1/length) of the whole response, GSPO (arXiv 2507.18071). Its value is a constant, and the
            gradient flows through each token's own log-prob (their GSPO-token form): the same gradient, and separable

a is 1 for the token mean (DAPO) and for the sum over a constant (Dr. GRPO), 1/length of the token's trajectory for the sequence mean
(GRPO as first published). A trajectory is one response, or all samples that an agent's work on a problem became. The ratio of gspo, and a
correction of the level sequence, are of one sample.

Shapes: T tokens of S packed responses (and prompts, whose mask is 0). Sums come back: divide by `loss_denominator` of
the whole batch, over micro-batches and ranks, never by what one micro-batch happens to hold.

A loss of the user's own (`rl.own_loss`) stands in for `token_policy_loss`. It may call `log_ratio_of` and `loss_from`, or
`token_policy_loss` itself, which is that of ppo then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mtpctl.recipe.rl import RlConfig
from mtpctl.rl.corrections import correction_weights
from mtpctl.rl.divergence import kl_estimate
from mtpctl.rl.limits import MAX_LOG_RATIO
from mtpctl.rl.mismatch import token_mismatch, token_mismatch_metrics
from mtpctl.rl.segments import sequence_mean, sequence_sum
from mtpctl.rl.surrogates import Surrogate, clipped, soft_gate, weighted_logprob


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One packed micro-batch. All [T]; `logprob` and `entropy` carry the gradient, the others are constants.

    `mask` is 1 at tokens that are trained. `seq_ids` numbers the responses from 0 to `num_sequences` - 1. `same_weights` is 1 at tokens
    that were sampled under the very weights that `logprob` is computed with; where it is given, the loss also measures how far behaviour
    and trained policy are apart (see `mismatch`). `trajectory_tokens` is the number of trained tokens of the token's trajectory; None if
    each response is a trajectory.
    """

    logprob: Tensor
    old_logprob: Tensor
    behaviour_logprob: Tensor
    advantage: Tensor
    mask: Tensor
    seq_ids: Tensor
    num_sequences: int
    entropy: Tensor | None = None
    ref_logprob: Tensor | None = None
    same_weights: Tensor | None = None
    trajectory_tokens: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """Constants of each token [T] in the notation of the module: `anchor`, `advantage` A, `weight` w, and `aggregation` a (0 where the
    token is not trained).

    `behaviour` log-probs and `same_weights` are there where the loss also measures how far behaviour and trained policy are apart.
    """

    anchor: Tensor
    advantage: Tensor
    weight: Tensor
    aggregation: Tensor
    ref_logprob: Tensor | None = None
    behaviour: Tensor | None = None
    same_weights: Tensor | None = None

    def at(self, tokens: Tensor) -> TokenTerms:
        """The constants of some tokens: `tokens` [t] are indices into the T."""

        def pick(column: Tensor | None) -> Tensor | None:
            return None if column is None else column[tokens]

        return TokenTerms(
            self.anchor[tokens],
            self.advantage[tokens],
            self.weight[tokens],
            self.aggregation[tokens],
            pick(self.ref_logprob),
            pick(self.behaviour),
            pick(self.same_weights),
        )


@dataclass(frozen=True, slots=True)
class LossOut:
    """`loss_sum` carries the gradient; `sums` are detached scalars, which are added up over micro-batches and ranks for `loss_metrics`."""

    loss_sum: Tensor
    sums: dict[str, Tensor]


@torch.no_grad()
def token_terms(inputs: LossInputs, config: RlConfig) -> TokenTerms:
    """The constants of each token. Only gspo reads `inputs.logprob`."""
    mask = inputs.mask.to(inputs.advantage.dtype)
    trained = mask.bool()
    anchor = inputs.old_logprob
    if config.loss == "gspo":
        log_ratio = torch.where(trained, inputs.logprob.detach() - inputs.old_logprob, 0.0)
        mean = sequence_mean(log_ratio, mask.to(log_ratio.dtype), inputs.seq_ids, inputs.num_sequences)
        anchor = inputs.logprob.detach() - mean[inputs.seq_ids]
    weight = torch.ones_like(mask)
    if config.loss == "decoupled" or config.correction.mode != "off":
        weight = correction_weights(
            inputs.old_logprob, inputs.behaviour_logprob, mask, inputs.seq_ids, inputs.num_sequences, config.correction
        ).weight
    aggregation = mask
    if config.aggregate == "sequence":
        length = inputs.trajectory_tokens
        if length is None:
            length = sequence_sum(mask, inputs.seq_ids, inputs.num_sequences)[inputs.seq_ids]
        aggregation = mask / length.clamp(min=1)
    behaviour = None if inputs.same_weights is None else inputs.behaviour_logprob
    return TokenTerms(anchor, inputs.advantage, weight, aggregation, inputs.ref_logprob, behaviour, inputs.same_weights)


def token_policy_loss(logprob: Tensor, entropy: Tensor | None, terms: TokenTerms, config: RlConfig) -> LossOut:
    """The separable part, for any slice of the tokens: their log-probs and entropies [t], and their terms.

    Raises ValueError where the config has an entropy bonus and no entropy is given, or a KL penalty and no reference log-probs.
    """
    log_ratio = log_ratio_of(logprob, terms)
    trained = terms.aggregation > 0
    made: Surrogate
    if config.loss == "cispo":
        made = weighted_logprob(logprob, log_ratio, terms.advantage, trained, config)
    elif config.loss == "sapo":
        made = soft_gate(log_ratio, terms.advantage, trained, config)
    else:
        made = clipped(log_ratio, terms.advantage, trained, config)
    return loss_from(made.value, logprob, entropy, terms, config, made.sums)


def log_ratio_of(logprob: Tensor, terms: TokenTerms) -> Tensor:
    """log r [t], 0 where the token is not trained, and bounded so that r and its square are finite."""
    # Zero before exp, not after: an infinity at a prompt token would turn the gradient into NaN.
    return torch.where(terms.aggregation > 0, logprob - terms.anchor, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def loss_from(
    surrogate: Tensor,
    logprob: Tensor,
    entropy: Tensor | None,
    terms: TokenTerms,
    config: RlConfig,
    sums: Mapping[str, Tensor] | None = None,
) -> LossOut:
    """The loss of tokens from their surrogate [t]: weighed, aggregated, with entropy bonus and KL penalty, and the sums of all metrics.

    `sums`: further sums over trained tokens, whose means become metrics (see `loss_metrics`). Raises ValueError like `token_policy_loss`.
    """
    if config.entropy_coef and entropy is None:
        raise ValueError("entropy_coef is set, and no entropy was given")
    if config.kl_coef and terms.ref_logprob is None:
        raise ValueError("kl_coef is set, and no reference log-probs were given")
    trained = terms.aggregation > 0
    policy = terms.weight * surrogate * terms.aggregation
    loss_sum = policy.sum()
    log_ratio = log_ratio_of(logprob.detach(), terms)
    found = {
        "tokens": trained.sum(),
        "weighted": terms.aggregation.sum(),
        "pg_loss": policy.detach().sum(),
        "ratio": (log_ratio.exp() * trained).sum(),
        "ppo_kl": -log_ratio.sum(),
        **(sums or {}),
    }
    if entropy is not None:
        kept = torch.where(trained, entropy, 0.0)
        found["entropy"] = kept.detach().sum()
        if config.entropy_coef:
            loss_sum = loss_sum - config.entropy_coef * (kept * terms.aggregation).sum()
    if terms.ref_logprob is not None:
        kl = torch.where(trained, kl_estimate(logprob, terms.ref_logprob, config.kl_estimator), 0.0)
        found["ref_kl"] = kl.detach().sum()
        if config.kl_coef:
            loss_sum = loss_sum + config.kl_coef * (kl * terms.aggregation).sum()
    if terms.behaviour is not None and terms.same_weights is not None:
        found |= token_mismatch(logprob.detach(), terms.behaviour, trained, terms.same_weights)
    return LossOut(loss_sum, found)


def policy_loss(inputs: LossInputs, config: RlConfig) -> LossOut:
    """The loss of one packed micro-batch: both parts, one after the other."""
    return token_policy_loss(inputs.logprob, inputs.entropy, token_terms(inputs, config), config)


def loss_denominator(config: RlConfig, *, tokens: int, trajectories: int, max_tokens: int) -> int:
    """The denominator of the summed loss of a whole batch, at least 1: the number of its trained tokens, of its trajectories, or of
    trajectories times `max_tokens`.

    Trajectories without a trained token count too: Dr. GRPO (arXiv 2503.20783) divides by the number of sampled responses, whether they
    are masked or not.
    """
    return max({"token": tokens, "sequence": trajectories, "constant": trajectories * max_tokens}[config.aggregate], 1)


_MEANS = {"ratio": "ratio_mean", "clip_low": "clip_fraction_low", "clip_high": "clip_fraction_high", "clip_dual": "clip_fraction_dual"}
"""Metrics whose names are not those of their sums."""


def loss_metrics(sums: Mapping[str, Tensor | float]) -> dict[str, float]:
    """`actor/*` from sums that were added up over all micro-batches and ranks, and `rollout_corr/*` where the loss measured the mismatch.

    `actor/pg_loss` is a mean over tokens, or over trajectories with aggregate: sequence. Every other sum becomes its mean over tokens.
    """
    s = {name: float(value) for name, value in sums.items()}
    tokens = max(s["tokens"], 1.0)
    metrics = {"actor/pg_loss": s["pg_loss"] / max(s["weighted"], 1e-9)}
    for name, value in s.items():
        if name not in ("tokens", "weighted", "pg_loss") and not name.startswith("mismatch/"):
            metrics[f"actor/{_MEANS.get(name, name)}"] = value / tokens
    return metrics | token_mismatch_metrics(s)
