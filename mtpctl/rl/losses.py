"""The policy loss on packed tokens, split into two parts so that a fused kernel can compute the second.

`token_terms` computes the constants of each token, including everything that depends on a whole response. `token_policy_loss` is
separable: a token's loss depends only on its own log-prob, entropy and constants. A kernel can therefore evaluate and differentiate it in
chunks while it computes the log-probs.

With r = exp(logprob - anchor), A the advantage, w the weight, a the aggregation weight:

    loss      = a (w surrogate - entropy_coef · entropy + kl_coef · kl)

By default the anchor is the old log-prob, and w is the correction weight of old against behaviour (1 with the correction off). Exceptions:

decoupled   w = old/behaviour always, bounded by the correction (off: unbounded). Old is the proximal policy:
            Hilton et al. (arXiv 2110.00641), as in AReaL (arXiv 2505.24298)
gspo        r = (π/old)^(1/length) of the whole response, GSPO (arXiv 2507.18071). The anchor gives r this value at every
            token, and the gradient of r flows only through the token's own log-prob (GSPO-token). This does not change the gradient
            of the response, and keeps the loss separable

Surrogates, with sg for stop-gradient:

ppo, decoupled, gspo  max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))              PPO; clip-higher: DAPO (arXiv 2503.14476)
                      for A < 0 and clip_dual = c > 0: at most -A c                   dual clip (arXiv 1912.09729)
cispo                 -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log π               MiniMax-M1 (arXiv 2506.13585), equations 4 and 5
sapo                  -A 4/τ sigmoid(τ (r - 1)), τ = tau_pos for A > 0, else tau_neg  SAPO (arXiv 2511.20347)

PPO's clip removes the gradient of a token with r > 1 + clip_high and A > 0, or r < 1 - clip_low and A < 0. CISPO keeps the gradient of
every token, with a bounded weight. SAPO weights it by r · g. Its gate g = 4 p (1 - p), p = sigmoid(τ (r - 1)), decreases with the distance
of r from 1. On-policy, all surrogates have the gradient -A ∇log π.

a is 1 for the token mean (DAPO) and for the sum over a constant (Dr. GRPO), and 1/length of the token's trajectory for the sequence mean
(GRPO as first published). A trajectory is one response, or all samples of an agent's work on a problem. The ratio of gspo and a
correction of level sequence are computed per sample.

Shapes: T tokens of S packed responses (and prompts, whose mask is 0), t tokens of any slice of them. Results are sums: divide them by
`loss_denominator` of the whole batch, across microbatches and ranks.

With a teacher (on-policy distillation), `teacher_gain` is added to the advantages, or `candidate_kl` to the loss.

A user-defined loss (`mtpctl.rl.user_objective`) replaces `token_policy_loss`. It may call `log_ratio_of` and `loss_from`, or
`token_policy_loss` itself, which then computes ppo.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mtpctl.recipe.rl import RlConfig
from mtpctl.rl.corrections import MAX_LOG_RATIO, correction_weights, sequence_mean, sequence_sum, token_mismatch, token_mismatch_metrics

Kl = Literal["reverse", "forward"]
MAX_RATIO = 10.0
"""Bound of teacher probability / policy probability in the forward KL; the ratio is unbounded for rare tokens."""
MIN_REST = 1e-6
"""Lower bound of the teacher's probability outside its candidates, in the reverse KL, which diverges at 0. With fp32 log-probs a smaller
value is rounding error, and may be negative."""


def kl_estimate(logprob: Tensor, ref_logprob: Tensor, kind: Literal["k2", "k3"]) -> Tensor:
    """Monte-Carlo estimate [T] of KL(policy ‖ reference) at tokens that the policy sampled (http://joschu.net/blog/kl-approx.html).

    With l = log policy - log reference: k2 = l²/2 (biased, low variance), k3 = exp(-l) + l - 1 (unbiased, nonnegative). As loss terms on
    policy, k2 has the gradient of the true KL, and k3 the gradient of KL(reference ‖ policy).
    """
    difference = (logprob - ref_logprob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference**2 / 2 if kind == "k2" else torch.expm1(-difference) + difference


class Surrogate(NamedTuple):
    """`value` [t] carries the gradient; `sums` are detached scalars over trained tokens, with the same names for every slice."""

    value: Tensor
    sums: dict[str, Tensor]


def ppo_surrogate(log_ratio: Tensor, advantage: Tensor, trained: Tensor, config: RlConfig) -> Surrogate:
    """PPO's surrogate with separate lower and upper clips and the dual clip."""
    ratio = log_ratio.exp()
    unclipped = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    value = torch.maximum(unclipped, clipped)
    dual = torch.zeros_like(trained)
    if config.clip_dual:
        bound = -advantage * config.clip_dual
        dual = trained & (advantage < 0) & (value > bound)
        value = torch.where(advantage < 0, torch.minimum(value, bound), value)
    is_clipped = trained & (clipped > unclipped)
    sums = {"clip_low": (is_clipped & (advantage < 0)).sum(), "clip_high": (is_clipped & (advantage > 0)).sum(), "clip_dual": dual.sum()}
    return Surrogate(value, sums)


def cispo_surrogate(logprob: Tensor, log_ratio: Tensor, advantage: Tensor, trained: Tensor, config: RlConfig) -> Surrogate:
    """CISPO's surrogate: every token has a gradient, with a bounded importance weight."""
    ratio = log_ratio.detach().exp()
    low, high = 1 - config.clip_low, 1 + config.clip_high
    value = -ratio.clamp(low, high) * advantage * torch.where(trained, logprob, 0.0)
    return Surrogate(value, {"clip_low": (trained & (ratio < low)).sum(), "clip_high": (trained & (ratio > high)).sum()})


def sapo_surrogate(log_ratio: Tensor, advantage: Tensor, trained: Tensor, config: RlConfig) -> Surrogate:
    """SAPO's surrogate. Its metric `gate` is 4 p (1 - p), p as in the module docstring: 1 for r = 1, near 0 for r far from 1."""
    tau = torch.where(advantage > 0, config.tau_pos, config.tau_neg).to(log_ratio.dtype)
    p = torch.sigmoid(tau * (log_ratio.exp() - 1))
    return Surrogate(-advantage * p * 4 / tau, {"gate": ((4 * p * (1 - p)).detach() * trained).sum()})


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One packed microbatch. All tensors are [T]; `logprob` and `entropy` carry the gradient, the others are constants.

    Attributes:
        mask: 1 for trained tokens.
        seq_ids: index of the token's response, from 0 to `num_sequences` - 1.
        same_weights: 1 for tokens sampled under the weights that `logprob` is computed with. If set, the loss also measures the mismatch
            between behaviour and trained policy (`mtpctl.rl.corrections`).
        stale_kv: 1 for tokens sampled with a stale KV cache, whose mismatch is measured separately. None: there are none.
        trajectory_tokens: number of trained tokens in the token's trajectory; None if each response is a trajectory.
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
    stale_kv: Tensor | None = None
    trajectory_tokens: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """Constants of each token [T]: anchor, A, w and a of the module docstring. `aggregation` is 0 for tokens that are not trained.

    `behaviour` log-probs and `same_weights` are set if the loss also measures the mismatch, `stale_kv` if some tokens may have been sampled
    with a stale KV cache.
    """

    anchor: Tensor
    advantage: Tensor
    weight: Tensor
    aggregation: Tensor
    ref_logprob: Tensor | None = None
    behaviour: Tensor | None = None
    same_weights: Tensor | None = None
    stale_kv: Tensor | None = None

    def at(self, tokens: Tensor) -> TokenTerms:
        """The constants of the tokens with these indices [t]."""
        columns: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: column[tokens] for name, column in columns.items() if column is not None})


@dataclass(frozen=True, slots=True)
class LossOut:
    """`loss_sum` carries the gradient. `sums` are detached scalars; add them up over microbatches and ranks for `loss_metrics`."""

    loss_sum: Tensor
    sums: dict[str, Tensor]


@torch.no_grad()
def token_terms(inputs: LossInputs, config: RlConfig) -> TokenTerms:
    """Compute the constants of each token. Only gspo reads `inputs.logprob`."""
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
    return TokenTerms(anchor, inputs.advantage, weight, aggregation, inputs.ref_logprob, behaviour, inputs.same_weights, inputs.stale_kv)


def token_policy_loss(logprob: Tensor, entropy: Tensor | None, terms: TokenTerms, config: RlConfig) -> LossOut:
    """Compute the separable part of the loss for any slice of the tokens. `logprob` and `entropy` are [t].

    Raises ValueError if the config has an entropy bonus but `entropy` is None, or a KL penalty but no reference log-probs are set.
    """
    log_ratio = log_ratio_of(logprob, terms)
    trained = terms.aggregation > 0
    surrogate: Surrogate
    if config.loss == "cispo":
        surrogate = cispo_surrogate(logprob, log_ratio, terms.advantage, trained, config)
    elif config.loss == "sapo":
        surrogate = sapo_surrogate(log_ratio, terms.advantage, trained, config)
    else:
        surrogate = ppo_surrogate(log_ratio, terms.advantage, trained, config)
    return loss_from(surrogate.value, logprob, entropy, terms, config, surrogate.sums)


def log_ratio_of(logprob: Tensor, terms: TokenTerms) -> Tensor:
    """log r [t]: 0 for tokens that are not trained, and bounded so that r and its square are finite."""
    # Masked before exp, because an infinity at a prompt token would make the gradient NaN.
    return torch.where(terms.aggregation > 0, logprob - terms.anchor, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def loss_from(
    surrogate: Tensor,
    logprob: Tensor,
    entropy: Tensor | None,
    terms: TokenTerms,
    config: RlConfig,
    sums: Mapping[str, Tensor] | None = None,
) -> LossOut:
    """Weight and aggregate a surrogate [t], add entropy bonus and KL penalty, and compute the sums of all metrics.

    `sums`: additional sums over trained tokens, whose means become metrics (`loss_metrics`). Raises ValueError like `token_policy_loss`.
    """
    if config.entropy_coef and entropy is None:
        raise ValueError("entropy_coef is set, but entropy is None")
    if config.kl_coef and terms.ref_logprob is None:
        raise ValueError("kl_coef is set, but there are no reference log-probs")
    trained = terms.aggregation > 0
    policy = terms.weight * surrogate * terms.aggregation
    loss_sum = policy.sum()
    log_ratio = log_ratio_of(logprob.detach(), terms)
    metrics = {
        "tokens": trained.sum(),
        "weighted": terms.aggregation.sum(),
        "pg_loss": policy.detach().sum(),
        "ratio": (log_ratio.exp() * trained).sum(),
        "ppo_kl": -log_ratio.sum(),
        **(sums or {}),
    }
    if entropy is not None:
        trained_entropy = torch.where(trained, entropy, 0.0)
        metrics["entropy"] = trained_entropy.detach().sum()
        if config.entropy_coef:
            loss_sum = loss_sum - config.entropy_coef * (trained_entropy * terms.aggregation).sum()
    if terms.ref_logprob is not None:
        kl = torch.where(trained, kl_estimate(logprob, terms.ref_logprob, config.kl_estimator), 0.0)
        metrics["ref_kl"] = kl.detach().sum()
        if config.kl_coef:
            loss_sum = loss_sum + config.kl_coef * (kl * terms.aggregation).sum()
    if terms.behaviour is not None and terms.same_weights is not None:
        metrics |= token_mismatch(logprob.detach(), terms.behaviour, trained, terms.same_weights, terms.stale_kv)
    return LossOut(loss_sum, metrics)


def policy_loss(inputs: LossInputs, config: RlConfig) -> LossOut:
    """Compute both parts of the loss for one packed microbatch."""
    return token_policy_loss(inputs.logprob, inputs.entropy, token_terms(inputs, config), config)


def loss_denominator(config: RlConfig, *, tokens: int, trajectories: int, max_tokens: int) -> int:
    """Denominator of the summed loss of a whole batch, at least 1. Counts trajectories without trained tokens, like Dr. GRPO."""
    return max({"token": tokens, "sequence": trajectories, "constant": trajectories * max_tokens}[config.aggregate], 1)


_METRIC_NAMES = {
    "ratio": "ratio_mean",
    "clip_low": "clip_fraction_low",
    "clip_high": "clip_fraction_high",
    "clip_dual": "clip_fraction_dual",
}
"""Metric names that differ from the names of their sums."""


def loss_metrics(sums: Mapping[str, Tensor | float]) -> dict[str, float]:
    """`actor/*` from the sums of all microbatches and ranks, and `rollout_corr/*` if the loss measured the mismatch.

    `actor/pg_loss` is a mean over tokens; with `aggregate: sequence`, over the trajectories with trained tokens. Other `actor/*` are means
    over tokens.
    """
    s = {name: float(value) for name, value in sums.items()}
    tokens = max(s["tokens"], 1.0)
    metrics = {"actor/pg_loss": s["pg_loss"] / max(s["weighted"], 1e-9)}
    for name, value in s.items():
        if name not in ("tokens", "weighted", "pg_loss") and not name.startswith("mismatch/"):
            metrics[f"actor/{_METRIC_NAMES.get(name, name)}"] = value / tokens
    return metrics | token_mismatch_metrics(s)


def teacher_gain(kl: Kl, teacher: Tensor, behaviour: Tensor) -> Tensor:
    """Per-token gain [T] whose policy gradient is the gradient of the negative KL, from the log-probs of the sampled tokens.

    reverse, KL(policy ‖ teacher): log teacher - log policy (MiniLLM, arXiv 2306.08543, equation 3, without the term of later tokens;
    GKD, arXiv 2306.13649, with lambda 1). forward, KL(teacher ‖ policy): the probability ratio, bounded by `MAX_RATIO`, minus its mean 1,
    which reduces variance.
    """
    difference = teacher - behaviour
    return difference if kl == "reverse" else difference.clamp(max=math.log(MAX_RATIO)).exp() - 1


def candidate_kl(kl: Kl, policy: Tensor, rest: Tensor, teacher: Tensor) -> Tensor:
    """KL [T] over k candidate tokens, given as log-probs [T, k], and over all other tokens merged into one outcome.

    `rest` [T] is the policy's log-prob of the merged outcome. It is passed separately, because 1 minus the candidates' probabilities is
    imprecise if the difference is small. The result is at most the KL of the full distributions, and differentiable in `policy` and
    `rest`. reverse: KL(policy ‖ teacher), forward: KL(teacher ‖ policy).
    """
    teacher = teacher.double()
    teacher_rest = (1 - teacher.exp().sum(-1)).clamp(min=MIN_REST if kl == "reverse" else 0)
    if kl == "reverse":
        return (policy.exp() * (policy - teacher)).sum(-1) + rest.exp() * (rest - teacher_rest.log())
    return (teacher.exp() * (teacher - policy)).sum(-1) + torch.xlogy(teacher_rest, teacher_rest) - teacher_rest * rest
