"""Distributes an update's samples to the trainer ranks: `Sample` → `Share` of a data-parallel rank → `Sequence`.

A share stores the tokens of its samples in one array per field. It is written to Ray's object store once. The tensor-, pipeline- and
context-parallel ranks of a data-parallel rank read the same memory, and their sequences are views of it. Every rank also gets a table with
one entry per sample of the update, from which it computes advantages.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mtpctl.errors import RuntimeFailure
from mtpctl.routes import Routes
from mtpctl.samples import Sample

if TYPE_CHECKING:
    from mtpctl.trainer import batch

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class BatchTable:
    """Columns with an entry per sample of an update, ordered by group.

    group_numbers: number of the sample's group. trajectories: number of its trajectory, which may consist of several samples.
    prompt_lengths, response_lengths: token counts. sampled: number of response tokens that the policy sampled. scored: whether the sample
    has old log-probs. steps: the optimizer step that trains on the sample. A step has whole groups, and the numbers of groups per step
    differ by at most one.
    """

    rewards: npt.NDArray[np.float64]
    group_numbers: Ints
    prompt_lengths: Ints
    response_lengths: Ints
    sampled: Ints
    scored: Bools
    steps: Ints
    trajectories: Ints

    @classmethod
    def of(cls, samples: Sequence[Sample], minibatches: int) -> BatchTable:
        """The table of rewarded samples, divided into `minibatches` optimizer steps.

        Raises RuntimeFailure if a reward or the log-prob of a trained token is not finite.
        """
        rewards = []
        for sample in samples:
            assert sample.reward is not None, f"{sample.prompt_id} was not rewarded"
            _check_logprobs(sample)
            if not math.isfinite(sample.reward):
                raise RuntimeFailure(f"{sample.prompt_id}: reward.function returned {sample.reward}; return finite numbers")
            rewards.append(sample.reward)
        group_numbers = {group_id: number for number, group_id in enumerate(dict.fromkeys(s.group_id for s in samples))}
        trajectories = {key: number for number, key in enumerate(dict.fromkeys((s.group_id, s.index) for s in samples))}
        groups = np.array([group_numbers[s.group_id] for s in samples], np.int32)
        return cls(
            np.array(rewards),
            groups,
            np.array([len(s.prompt_ids) for s in samples], np.int32),
            np.array([len(s.response_ids) for s in samples], np.int32),
            np.array([s.num_sampled for s in samples], np.int32),
            np.array([s.old_logprobs is not None for s in samples]),
            # Groups differ in size for agents, and if a checkpoint was written with another group_size.
            groups * minibatches // max(len(group_numbers), 1),
            np.array([trajectories[s.group_id, s.index] for s in samples], np.int32),
        )

    @property
    def has_unscored(self) -> bool:
        """Whether a non-empty response has no old log-probs."""
        return bool((~self.scored & (self.response_lengths > 0)).any())

    @property
    def trajectory_tokens(self) -> Ints:
        """For each sample, the number of sampled tokens of its whole trajectory."""
        totals = np.zeros(int(self.trajectories.max(initial=-1)) + 1, np.int32)
        np.add.at(totals, self.trajectories, self.sampled)
        return totals[self.trajectories]


@dataclass(frozen=True, slots=True)
class Minibatch:
    """This rank's part of an optimizer step.

    members: indices of samples in the share. microbatches: lists of indices into `members`. trajectories: number of trajectories of the
    whole step on all ranks, including those without a trained token.
    """

    members: list[int]
    microbatches: list[list[int]]
    trajectories: int


@dataclass(frozen=True, slots=True)
class Share:
    """The non-empty samples of one data-parallel rank.

    indices: of the samples in the batch, ascending. trajectory_tokens: see `BatchTable`. ids: each prompt followed by its response. Other
    token arrays have response tokens only; those with old or teacher log-probs have only the samples with `scored` or
    `has_teacher` set. candidate_counts: number of teacher candidates per response token, 0 for samples without candidates. span_counts:
    number of version spans of each sample, which together cover its response. span_lengths, span_versions, span_stale_kv: an entry per
    span.
    """

    dp_rank: int
    minibatches: list[Minibatch]
    indices: Ints
    trajectory_tokens: Ints
    names: list[str]
    prompt_lengths: Ints
    response_lengths: Ints
    ids: Ints
    mask: npt.NDArray[np.int8]
    behaviour_logprobs: Floats
    scored: Bools
    old_logprobs: Floats
    old_versions: Ints
    span_counts: Ints
    span_lengths: Ints
    span_versions: Ints
    span_stale_kv: Bools
    routes: list[Routes | None]
    has_teacher: Bools
    teacher_logprobs: Floats
    candidate_counts: Ints
    candidates: Ints
    candidate_logprobs: Floats

    @classmethod
    def of(
        cls, samples: Sequence[Sample], indices: list[int], dp_rank: int, minibatches: list[Minibatch], trajectory_tokens: Ints
    ) -> Share:
        """The share with the samples at these indices of the batch. trajectory_tokens: of every sample of the batch."""
        share_samples = [samples[index] for index in indices]
        spans = [span for s in share_samples for span in s.version_spans]
        return cls(
            dp_rank,
            minibatches,
            np.array(indices, np.int32),
            trajectory_tokens[indices],
            [s.name for s in share_samples],
            np.array([len(s.prompt_ids) for s in share_samples], np.int32),
            np.array([len(s.response_ids) for s in share_samples], np.int32),
            _concatenate([ids for s in share_samples for ids in (s.prompt_ids, s.response_ids)], np.int32),
            _concatenate([s.loss_mask for s in share_samples], np.int8),
            _concatenate([s.behaviour_logprobs for s in share_samples], np.float32),
            np.array([s.old_logprobs is not None for s in share_samples], np.bool_),
            _concatenate([s.old_logprobs for s in share_samples if s.old_logprobs is not None], np.float32),
            np.array([-1 if s.old_version is None else s.old_version for s in share_samples], np.int32),
            np.array([len(s.version_spans) for s in share_samples], np.int32),
            np.array([span.end - span.start for span in spans], np.int32),
            np.array([span.version for span in spans], np.int32),
            np.array([span.stale_kv for span in spans], np.bool_),
            [s.routes for s in share_samples],
            np.array([s.teacher_logprobs is not None for s in share_samples], np.bool_),
            _concatenate([s.teacher_logprobs for s in share_samples if s.teacher_logprobs is not None], np.float32),
            np.array([len(s.candidates or ()) // max(len(s.response_ids), 1) for s in share_samples], np.int32),
            _concatenate([s.candidates for s in share_samples if s.candidates is not None], np.int32),
            _concatenate([s.candidate_logprobs for s in share_samples if s.candidate_logprobs is not None], np.float32),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the token arrays, routes included."""
        columns: list[npt.NDArray[Any]] = [self.ids, self.mask, self.behaviour_logprobs, self.old_logprobs, self.teacher_logprobs]
        columns += [self.candidates, self.candidate_logprobs, *(routes for routes in self.routes if routes is not None)]
        return sum(column.nbytes for column in columns)

    def sequences(self) -> list[batch.Sequence]:
        """The samples as sequences for the engine.

        Columns: `behaviour`, and `old`, `teacher`, `candidates` [tokens, k] and `candidate_logprobs` [tokens, k] of samples that have them.
        """
        from mtpctl.trainer.batch import Sequence

        ids, mask, behaviour_logprobs, old_logprobs = (
            _Reader(column) for column in (self.ids, self.mask, self.behaviour_logprobs, self.old_logprobs)
        )
        teacher_logprobs, candidates, candidate_logprobs = map(_Reader, (self.teacher_logprobs, self.candidates, self.candidate_logprobs))
        sequences = []
        counts = zip(self.prompt_lengths.tolist(), self.response_lengths.tolist(), self.candidate_counts.tolist(), strict=True)
        for number, (prompt_length, response_length, candidate_count) in enumerate(counts):
            columns = {"behaviour": behaviour_logprobs.next(response_length)}
            if self.scored[number]:
                columns["old"] = old_logprobs.next(response_length)
            if self.has_teacher[number]:
                columns["teacher"] = teacher_logprobs.next(response_length)
            if candidate_count:
                shape = response_length, candidate_count
                columns["candidates"] = candidates.next(response_length * candidate_count).reshape(shape)
                columns["candidate_logprobs"] = candidate_logprobs.next(response_length * candidate_count).reshape(shape)
            tokens, loss_mask = ids.next(prompt_length + response_length), mask.next(response_length)
            sequences.append(Sequence(tokens, prompt_length, loss_mask, columns, self.routes[number], self.names[number]))
        return sequences

    def versions(self) -> list[Ints]:
        """For each sample, the weight version with which each response token was sampled."""
        return self._repeat_per_token(self.span_versions)

    def stale_kv(self) -> list[Bools]:
        """For each sample, whether each response token was sampled with a KV cache of earlier weights (`VersionSpan.stale_kv`)."""
        return self._repeat_per_token(self.span_stale_kv)

    def _repeat_per_token[T: np.generic](self, column: npt.NDArray[T]) -> list[npt.NDArray[T]]:
        """Repeat the value of each span for its tokens. Returns an array per sample."""
        lengths, values = _Reader(self.span_lengths), _Reader(column)
        return [np.repeat(values.next(count), lengths.next(count)) for count in self.span_counts.tolist()]


def distribute(
    samples: Sequence[Sample], *, minibatches: int, tokens_per_microbatch: int, dp: int
) -> tuple[BatchTable, list[Callable[[], Share]]]:
    """Return the table of an update's samples, and for each of `dp` ranks a function that creates its share.

    `partition` distributes the samples of each optimizer step. Samples with an empty response are in the table only: they count in their
    groups and in the number of trajectories. A step without sampled tokens is dropped. Shares are created one at a time, because each
    copies the tokens of its samples.
    """
    table = BatchTable.of(samples, minibatches)
    lengths, trajectory_tokens = table.prompt_lengths + table.response_lengths, table.trajectory_tokens
    steps: list[tuple[list[int], list[list[list[int]]], int]] = []
    for step in range(minibatches):
        members = np.flatnonzero(table.steps == step)
        indices = [index for index in members.tolist() if table.response_lengths[index]]
        if table.sampled[members].any():
            trajectories = len(np.unique(table.trajectories[members]))
            steps.append((indices, partition(lengths[indices].tolist(), tokens_per_microbatch, dp), trajectories))

    def build_share(rank: int) -> Share:
        share_indices: list[int] = []
        share_minibatches = []
        for indices, rank_microbatches, trajectories in steps:
            local_indices = sorted(i for micro in rank_microbatches[rank] for i in micro)
            positions = {i: n for n, i in enumerate(local_indices)}
            microbatches = [[positions[i] for i in micro] for micro in rank_microbatches[rank]]
            share_minibatches.append(
                Minibatch(list(range(len(share_indices), len(share_indices) + len(local_indices))), microbatches, trajectories)
            )
            share_indices += [indices[i] for i in local_indices]
        return Share.of(samples, share_indices, rank, share_minibatches, trajectory_tokens)

    return table, [partial(build_share, rank) for rank in range(dp)]


_MAX_K = 16
"""Maximum k that `_lower_bound` tries. If a larger k would give a better bound, `partition` only needs more attempts."""


def partition(lengths: Sequence[int], tokens_per_microbatch: int, dp: int) -> list[list[list[int]]]:
    """Assign sequences to microbatches: for each dp rank a list of microbatches, each a list of indices into `lengths`.

    Every rank gets the same number of microbatches, the last of which may be empty. Sequences are assigned longest first, each to the least
    loaded microbatch. The number of microbatches is the smallest multiple of dp with which each stays within the budget; a sequence longer
    than the budget gets its own microbatch. Deterministic. Raises ValueError if there are no sequences.
    """
    if not lengths:
        raise ValueError("there is no sequence to pack")
    length_array = np.asarray(lengths)
    longest_first = np.argsort(-length_array, kind="stable").tolist()
    count = max(dp, -(-sum(lengths) // tokens_per_microbatch), _lower_bound(length_array, tokens_per_microbatch))
    bins = None
    while bins is None:
        count = -(-count // dp) * dp
        bins = _assign_sequences(lengths, longest_first, tokens_per_microbatch, count)
        count += dp
    return [[sorted(b) for b in bins[rank::dp]] for rank in range(dp)]


def _lower_bound(lengths: np.ndarray, budget: int) -> int:
    """A lower bound on the number of microbatches: at most k sequences longer than budget / (k + 1) fit into one."""
    return max(-(-int(np.count_nonzero(lengths * (k + 1) > budget)) // k) for k in range(1, _MAX_K + 1))


def _assign_sequences(lengths: Sequence[int], order: list[int], budget: int, count: int) -> list[list[int]] | None:
    """Assign the sequences in this order, each to the least loaded of `count` microbatches. None if one overflows."""
    bins: list[list[int]] = [[] for _ in range(count)]
    # A heap of load * count + index, so that the first of equally loaded microbatches is the smallest. This range already is a heap.
    loads = list(range(count))
    one_per_bin = count >= len(lengths)
    for i in order:
        length = lengths[i]
        least_load, index = divmod(loads[0], count)
        if least_load and least_load + length > budget and not one_per_bin:
            return None
        bins[index].append(i)
        heapq.heapreplace(loads, loads[0] + length * count)
    return bins


def _check_logprobs(sample: Sample) -> None:
    is_trained = np.asarray(sample.loss_mask, np.bool_)
    for source, receiver, logprobs in (
        ("the rollout engine", "response token", sample.behaviour_logprobs),
        ("old log-probs", "response token", sample.old_logprobs),
        ("the teacher", "response token", sample.teacher_logprobs),
        ("the teacher", "a candidate of response token", sample.candidate_logprobs),
    ):
        if not logprobs:
            continue
        values = np.asarray(logprobs).reshape(len(is_trained), -1)
        if len(non_finite := np.argwhere(is_trained[:, None] & ~np.isfinite(values))):
            token, column = non_finite[0].tolist()
            raise RuntimeFailure(
                f"sample {sample.name}: {source} gave {receiver} {token} the log-prob {values[token, column]:g}, which cannot "
                "be trained on; check its sampling and scoring (rollout.top_k, rollout.top_p, logs/)"
            )


def _concatenate[T: np.generic](columns: list[array], dtype: type[T]) -> npt.NDArray[T]:
    return np.concatenate([np.asarray(column, dtype) for column in columns]) if columns else np.zeros(0, dtype)


class _Reader[T: np.generic]:
    """Returns consecutive views of a column."""

    def __init__(self, column: npt.NDArray[T]) -> None:
        self._column, self._start = column, 0

    def next(self, count: int) -> npt.NDArray[T]:
        start, self._start = self._start, self._start + count
        return self._column[start : self._start]
