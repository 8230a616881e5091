"""What the engine asks of a loss: a pure function of per-token log-probs, of as many tokens at a time as it is given.

Losses return sums; the denominators are global (all micro-batches, dp and cp ranks), so that cutting a batch another way
leaves its gradient the same.
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
from mtpctl.rl.distillation import candidate_kl, teacher_gain
from mtpctl.rl.losses import LossInputs, loss_denominator, loss_metrics, policy_loss, token_terms
from mtpctl.rl.user_objective import compute_advantages, loss_of
from mtpctl.samples import Logprobs, Sample, VersionSpan, ids_of, logprobs_of, mask_of
from mtpctl.trainer.batch import MicroBatch, Sequence
from mtpctl.trainer.share import BatchTable

Sums = dict[str, Tensor]


class Objective(Protocol):
    """A loss over response tokens.

    couples_tokens: a token's term looks at other tokens' log-probs. Then the log-probs of a micro-batch are all made before its loss,
    and a fourth matrix product of the head is paid in the backward pass.
    """

    needs_entropy: bool
    couples_tokens: bool

    def denominator(self, *, tokens: int, sequences: int) -> float:
        """What the summed loss of so many sequences is divided by, which have so many trained tokens."""

    def candidates(self, micro: MicroBatch) -> CandidateTerm | None:
        """A further term of the loss, of the log-probs of named tokens at each of the R response tokens; None: no such term."""

    def token_loss(self, micro: MicroBatch) -> TokenLoss:
        """Loss sum (scalar, differentiable) and metric sums of any of the micro-batch's R response tokens, as a function of their
        log-probs [r], entropies [r] (None where not needed) and places among the R. Where tokens are coupled it is given all of them.
        """

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Named metrics from those sums, added over all micro-batches and ranks."""


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


# The policy loss as the engine's objective: samples to columns, columns to `rl`'s inputs, sums to metrics.

CANDIDATE, CANDIDATE_LOGPROB = "candidate_{}", "candidate_logprob_{}"
"""Columns of a teacher's n-th likeliest token and its log-prob. Ids below 2^24 are exact in fp32, and no vocabulary is larger."""


class PolicyObjective:
    """RL's loss over packed responses. The sequences carry the columns old, behaviour, advantage and, with a KL penalty, reference.

    With a teacher's candidates it adds `coef` times the KL over them to each token's term, weighed as the term is.

    With a column same_weights (see `LossInputs`) it also tells how far behaviour and trained policy are apart. With a column
    trajectory_tokens, samples of one trajectory count as one response. `max_tokens` bounds a response, which `aggregate: constant` divides
    by. `trajectories`: those of the optimizer step, on all ranks, including those without a trained token; None: each sequence is one.
    """

    needs_entropy = True

    def __init__(self, config: RlConfig, *, max_tokens: int, trajectories: int | None = None) -> None:
        self.config, self.max_tokens, self.trajectories = config, max_tokens, trajectories
        self.token_policy_loss = loss_of(config)
        self.couples_tokens = config.loss == "gspo"

    def denominator(self, *, tokens: int, sequences: int) -> float:
        trajectories = sequences if self.trajectories is None else self.trajectories
        return float(loss_denominator(self.config, tokens=tokens, trajectories=trajectories, max_tokens=self.max_tokens))

    def candidates(self, micro: MicroBatch) -> CandidateTerm | None:
        teacher = self.config.teacher
        if teacher is None or not teacher.topk:
            return None
        ids, logprobs = (
            torch.stack([micro.columns[name.format(place)] for place in range(teacher.topk)], 1) for name in (CANDIDATE, CANDIDATE_LOGPROB)
        )
        weight = teacher.coef * token_terms(self._inputs(micro, micro.columns["old"], None), self.config).aggregation

        def divergence(named: Tensor, rest: Tensor, rows: Tensor) -> Tensor:
            return candidate_kl(teacher.kl, named, rest, logprobs[rows])

        return CandidateTerm(ids.long(), weight, divergence)

    def token_loss(self, micro: MicroBatch) -> TokenLoss:
        def coupled(logprob: Tensor, entropy: Tensor | None, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            out = policy_loss(self._inputs(micro, logprob, entropy), self.config)
            return out.loss_sum, out.sums

        if self.couples_tokens:
            return coupled
        # In place of log-probs, which are yet to be made, and at which the terms of this loss do not look.
        terms = token_terms(self._inputs(micro, micro.columns["old"], None), self.config)

        def separable(logprob: Tensor, entropy: Tensor | None, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
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
            trajectory_tokens=columns.get("trajectory_tokens"),
        )

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return loss_metrics(sums)


def advantages(table: BatchTable, config: RlConfig, *, max_tokens: int, context: int) -> list[float]:
    """One advantage a sample of a whole update, from rewards after overlong shaping. Every rank has the table, and computes the same.

    The samples of one trajectory share an advantage. In its group a trajectory counts once, with the worst of its shaped rewards.
    """
    limits = np.minimum(max_tokens, context - table.prompts).tolist()
    rows = zip(table.rewards.tolist(), table.responses.tolist(), limits, strict=True)
    shaped = np.array([reward + overlong_penalty(length, limit, config.overlong) for reward, length, limit in rows])
    of, count = table.trajectories, int(table.trajectories.max(initial=-1)) + 1
    worst, groups, lengths = np.full(count, np.inf), np.zeros(count, np.int64), np.zeros(count, np.int64)
    np.minimum.at(worst, of, shaped)
    groups[of] = table.groups
    np.add.at(lengths, of, table.sampled)
    values = compute_advantages(torch.from_numpy(worst), torch.from_numpy(groups), torch.from_numpy(lengths), config)
    if count and not bool((values.abs() <= torch.finfo(torch.float32).max).all()):
        raise RuntimeFailure(
            f"train.rl.advantage: {config.advantage} computes an advantage beyond the range of float32 from rewards of {worst.min():g} to "
            f"{worst.max():g}; scale the rewards of reward.function"
        )
    return values[torch.from_numpy(of.astype(np.int64))].tolist()


def _taught(sample: Sample, teacher: TeacherConfig, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The columns that a teacher adds or changes."""
    if not teacher.topk:
        thought, sampled = np.asarray(sample.teacher_logprobs, np.float32), columns["behaviour"]
        gain = teacher_gain(teacher.kl, torch.from_numpy(thought), torch.from_numpy(sampled)).numpy()
        return {"advantage": columns["advantage"] + teacher.coef * gain}
    assert sample.candidates is not None and sample.candidate_logprobs is not None, f"{sample.name} has no candidates"
    ids = np.asarray(sample.candidates, np.float32).reshape(-1, teacher.topk)
    logprobs = np.asarray(sample.candidate_logprobs, np.float32).reshape(-1, teacher.topk)
    found: dict[str, np.ndarray] = {}
    for place in range(teacher.topk):
        found |= {CANDIDATE.format(place): ids[:, place].copy(), CANDIDATE_LOGPROB.format(place): logprobs[:, place].copy()}
    return found


def scoring_sequence(sample: Sample, *, replay: bool = False) -> Sequence:
    """A sample as the engine scores it; with `replay` under its routes."""
    return Sequence(
        sample.token_ids,
        len(sample.prompt_ids),
        sample.loss_mask,
        routes=sample.routes if replay else None,
        name=sample.name,
    )


def training_sequence(
    sample: Sample,
    advantage: float,
    reference: Logprobs | None,
    weights: int | None = None,
    *,
    replay: bool = False,
    teacher: TeacherConfig | None = None,
    trajectory_tokens: int | None = None,
) -> Sequence:
    """A scored sample as the engine trains on it; with `replay` under its routes.

    `weights`: the version that does, where the loss is to compare policies; -1: none's. `teacher`: with `topk` its
    candidates become columns that `PolicyObjective` reads; else `coef` times `teacher_gain` is added to each token's advantage.
    `trajectory_tokens`: the sampled tokens of the sample's trajectory, if the loss weighs tokens by them.
    """
    assert sample.old_logprobs is not None, f"{sample.prompt_id} was not scored"
    tokens, spans = len(sample.response_ids), sample.version_spans
    columns = {
        "old": np.asarray(sample.old_logprobs, np.float32),
        "behaviour": np.asarray(sample.behaviour_logprobs, np.float32),
        "advantage": np.full(tokens, advantage, np.float32),
    }
    if teacher is not None and sample.teacher_logprobs is not None:
        columns |= _taught(sample, teacher, columns)
    if reference is not None:
        columns["reference"] = np.asarray(reference, np.float32)
    if trajectory_tokens is not None:
        columns["trajectory_tokens"] = np.full(tokens, trajectory_tokens, np.float32)
    if weights is not None:
        under = np.array([span.version == weights for span in spans], np.float32)
        columns["same_weights"] = np.repeat(under, [span.end - span.start for span in spans])
    return replace(scoring_sequence(sample, replay=replay), columns=columns)


def stand_in(*, reference: bool, weights: int | None, teacher: TeacherConfig | None = None, by_trajectory: bool = False) -> Sequence:
    """What a rank without a sample of a minibatch lays out: two tokens that no loss sees, with the columns that the others have."""
    nothing = [0.0]
    sample = Sample("", "", ids_of([0]), response_ids=ids_of([0]), loss_mask=mask_of([0]), behaviour_logprobs=logprobs_of(nothing))
    sample.old_logprobs, sample.version_spans = logprobs_of(nothing), [VersionSpan(0, 1, 0)]
    if teacher is not None:
        sample.teacher_logprobs = logprobs_of(nothing)
        sample.candidates, sample.candidate_logprobs = ids_of([0] * teacher.topk), logprobs_of(nothing * teacher.topk)
    old = logprobs_of(nothing) if reference else None
    return training_sequence(sample, 0.0, old, weights, teacher=teacher, trajectory_tokens=0 if by_trajectory else None)
