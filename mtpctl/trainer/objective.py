"""Losses of the trunk: the protocol that the training engine calls, next-token prediction, and the policy loss.

An objective is a pure function of the log-probs of any subset of tokens. It returns sums. The training engine divides them by
denominators that count all microbatches, dp and cp ranks, so the gradient does not depend on how a batch is split.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mtpctl.errors import RuntimeFailure
from mtpctl.kernels.candidates import CandidateTerm
from mtpctl.kernels.policy import TokenLoss
from mtpctl.recipe.rl import RlConfig, TeacherConfig
from mtpctl.rl.advantages import overlong_penalty
from mtpctl.rl.losses import LossInputs, candidate_kl, loss_denominator, loss_metrics, policy_loss, teacher_gain, token_terms
from mtpctl.rl.user_objective import compute_advantages, load_loss
from mtpctl.trainer.batch import MicroBatch, Sequence
from mtpctl.trainer.share import BatchTable

Sums = dict[str, Tensor]


class Objective(Protocol):
    """A loss over response tokens.

    couples_tokens: a token's term depends on the log-probs of other tokens. All log-probs of a microbatch are then computed before its
    loss, and the backward pass recomputes the logits, so the LM head takes four matrix products instead of three.
    """

    needs_entropy: bool
    couples_tokens: bool

    def denominator(self, *, tokens: int, sequences: int) -> float:
        """The divisor of the summed loss. tokens: number of trained tokens."""

    def candidates(self, micro: MicroBatch) -> CandidateTerm | None:
        """An additional loss on the log-probs of candidate tokens at each response token, if any."""

    def token_loss(self, micro: MicroBatch) -> TokenLoss:
        """A function of log-probs [r], entropies [r] (None unless needed) and indices of a subset of the R response tokens.

        It returns their loss sum (scalar, differentiable) and metric sums. If tokens are coupled, it is called with all R tokens.
        """

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Metrics from the metric sums of `token_loss`, added over all microbatches and ranks."""


class NextToken:
    """Supervised cross-entropy over the response."""

    needs_entropy = False
    couples_tokens = False

    def denominator(self, *, tokens: int, sequences: int) -> float:
        return float(max(1, tokens))

    def candidates(self, micro: MicroBatch) -> CandidateTerm | None:
        return None

    def token_loss(self, micro: MicroBatch) -> TokenLoss:
        def loss(logprob: Tensor, entropy: Tensor | None, tokens: Tensor) -> tuple[Tensor, Sums]:
            mask = micro.mask[tokens]
            value = -(logprob * mask).sum()
            return value, {"loss": value.detach(), "tokens": mask.sum()}

        return loss

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return {"sft/loss": sums["loss"] / max(1.0, sums["tokens"])}


class DraftsOnly(NextToken):
    """No loss of the trunk: only the MTP losses count. Its metric is the trunk's cross-entropy."""

    def token_loss(self, micro: MicroBatch) -> TokenLoss:
        cross_entropy = super().token_loss(micro)

        def loss(logprob: Tensor, entropy: Tensor | None, tokens: Tensor) -> tuple[Tensor, Sums]:
            value, sums = cross_entropy(logprob, entropy, tokens)
            return 0.0 * value, sums

        return loss

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return {"mtp/trunk_nll": sums["loss"] / max(1.0, sums["tokens"])}


class PolicyObjective:
    """The RL loss of sequences from `training_sequence`.

    max_tokens: maximum response length, the divisor of `aggregate: constant`. trajectories: number of trajectories of the optimizer step on
    all ranks, including those without a trained token; None if each sequence is one.
    """

    needs_entropy = True

    def __init__(self, config: RlConfig, *, max_tokens: int, trajectories: int | None = None) -> None:
        self.config, self.max_tokens, self.trajectories = config, max_tokens, trajectories
        self.token_policy_loss = load_loss(config)
        self.couples_tokens = config.loss == "gspo"

    def denominator(self, *, tokens: int, sequences: int) -> float:
        trajectories = sequences if self.trajectories is None else self.trajectories
        return float(loss_denominator(self.config, tokens=tokens, trajectories=trajectories, max_tokens=self.max_tokens))

    def candidates(self, micro: MicroBatch) -> CandidateTerm | None:
        """The KL divergence over a teacher's candidates, times `coef` and the token's aggregation weight, without corrections."""
        teacher = self.config.teacher
        if teacher is None or not teacher.topk:
            return None
        logprobs = micro.columns["candidate_logprobs"]
        weight = teacher.coef * token_terms(self._inputs(micro, micro.columns["old"], None), self.config).aggregation

        def divergence(policy: Tensor, rest: Tensor, rows: Tensor) -> Tensor:
            return candidate_kl(teacher.kl, policy, rest, logprobs[rows])

        return CandidateTerm(micro.columns["candidates"].long(), weight, divergence)

    def token_loss(self, micro: MicroBatch) -> TokenLoss:
        def coupled(logprob: Tensor, entropy: Tensor | None, tokens: Tensor) -> tuple[Tensor, Sums]:
            out = policy_loss(self._inputs(micro, logprob, entropy), self.config)
            return out.loss_sum, out.sums

        if self.couples_tokens:
            return coupled
        # The terms of a separable loss do not depend on the current log-probs; the old ones are placeholders.
        terms = token_terms(self._inputs(micro, micro.columns["old"], None), self.config)

        def separable(logprob: Tensor, entropy: Tensor | None, tokens: Tensor) -> tuple[Tensor, Sums]:
            out = self.token_policy_loss(logprob, entropy, terms.at(tokens), self.config)
            return out.loss_sum, out.sums

        return separable

    def _inputs(self, micro: MicroBatch, logprob: Tensor, entropy: Tensor | None) -> LossInputs:
        columns = micro.columns
        return LossInputs(
            logprob=logprob,
            old_logprob=columns["old"],
            behaviour_logprob=columns["behaviour"],
            advantage=columns["advantage"],
            mask=micro.mask,
            seq_ids=micro.seq_ids,
            num_sequences=len(micro.order),
            entropy=entropy,
            ref_logprob=columns.get("reference"),
            same_weights=columns.get("same_weights"),
            stale_kv=columns.get("stale_kv"),
            trajectory_tokens=columns.get("trajectory_tokens"),
        )

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return loss_metrics(sums)


def estimate_advantages(table: BatchTable, config: RlConfig, *, max_tokens: int, context: int) -> list[float]:
    """The advantage of each sample of an update, from rewards after overlong shaping. Identical on all ranks.

    The samples of a trajectory share one advantage. A trajectory counts once in its group, with the lowest of its shaped rewards.
    """
    limits = np.minimum(max_tokens, context - table.prompt_lengths).tolist()
    rows = zip(table.rewards.tolist(), table.response_lengths.tolist(), limits, strict=True)
    shaped_rewards = np.array([reward + overlong_penalty(length, limit, config.overlong) for reward, length, limit in rows])
    trajectories, count = table.trajectories, int(table.trajectories.max(initial=-1)) + 1
    rewards, groups, lengths = np.full(count, np.inf), np.zeros(count, np.int64), np.zeros(count, np.int64)
    np.minimum.at(rewards, trajectories, shaped_rewards)
    groups[trajectories] = table.group_numbers
    np.add.at(lengths, trajectories, table.sampled)
    values = compute_advantages(torch.from_numpy(rewards), torch.from_numpy(groups), torch.from_numpy(lengths), config)
    if count and not bool((values.abs() <= torch.finfo(torch.float32).max).all()):
        raise RuntimeFailure(
            f"train.rl.advantage: {config.advantage} computes an advantage beyond the range of float32 from rewards of "
            f"{rewards.min():g} to {rewards.max():g}; scale the rewards of reward.function"
        )
    return values[torch.from_numpy(trajectories.astype(np.int64))].tolist()


def training_sequence(
    sequence: Sequence,
    advantage: float,
    *,
    reference: np.ndarray | None = None,
    same_weights: np.ndarray | None = None,
    stale_kv: np.ndarray | None = None,
    teacher: TeacherConfig | None = None,
    trajectory_tokens: int | None = None,
) -> Sequence:
    """Copy a sequence, which must have old log-probs, with only the columns that `PolicyObjective` reads.

    reference: log-probs for the KL penalty. same_weights: mask of tokens that were sampled with the weights being trained. stale_kv: mask
    of tokens that were sampled with a stale KV cache. teacher: without `topk`, `coef` times `teacher_gain` is added to each token's
    advantage. trajectory_tokens: number of trained tokens in the sample's trajectory, if the loss weighs tokens by it.
    """
    assert "old" in sequence.columns, f"{sequence.name} has no old log-probs"
    tokens = len(sequence.loss_mask)
    columns: dict[str, np.ndarray] = {name: sequence.columns[name] for name in ("old", "behaviour")}
    columns["advantage"] = np.full(tokens, advantage, np.float32)
    if teacher is not None and teacher.topk:
        columns |= {name: sequence.columns[name] for name in ("candidates", "candidate_logprobs")}
    elif teacher is not None and "teacher" in sequence.columns:
        gain = teacher_gain(teacher.kl, torch.tensor(sequence.columns["teacher"]), torch.tensor(columns["behaviour"])).numpy()
        columns["advantage"] = columns["advantage"] + teacher.coef * gain
    if reference is not None:
        columns["reference"] = reference
    if trajectory_tokens is not None:
        columns["trajectory_tokens"] = np.full(tokens, trajectory_tokens, np.float32)
    if same_weights is not None:
        columns["same_weights"] = same_weights
    if stale_kv is not None:
        columns["stale_kv"] = stale_kv
    return replace(sequence, columns=columns)


def dummy_sequence(topk: int = 0) -> Sequence:
    """A prompt token and a response token with loss mask 0, and the columns that `training_sequence` reads, for a rank without samples."""
    zero = np.zeros(1, np.float32)
    columns = {"old": zero, "behaviour": zero, "teacher": zero}
    columns |= {"candidates": np.zeros((1, topk), np.float32), "candidate_logprobs": np.zeros((1, topk), np.float32)}
    return Sequence(np.zeros(2, np.int32), 1, np.zeros(1, np.bool_), columns)
