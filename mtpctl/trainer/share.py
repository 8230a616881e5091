"""How the samples of an update reach the trainer ranks: as a table of all samples, and for each data-parallel rank a share of their tokens.

The table goes to every rank. It has one entry for each sample, and holds all that advantages and the cut into minibatches need. A share
holds its samples' tokens, one array for each field. It is put into Ray's object store once: the tensor-, pipeline- and context-parallel
ranks of one data-parallel rank read the same memory. Where the trainer computes old log-probs, each rank computes those of its own share.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from mtpctl.errors import RuntimeFailure
from mtpctl.plan.partition import partition
from mtpctl.routes import Routes
from mtpctl.samples import Sample, VersionSpan, ids_of, mask_of

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BatchTable:
    """What every rank knows of each sample of an update; the samples are ordered by group.

    `groups`: the number of the sample's group; `trajectories`: that of its trajectory, which may be several samples. `prompts` and
    `responses`: their tokens. `sampled`: response tokens that the policy sampled. `scored`: whether the sample has old log-probs.
    `steps`: the optimizer step that trains on the sample, from 0. A step takes whole groups, as many as any other or one more.
    """

    rewards: npt.NDArray[np.float64]
    groups: Ints
    prompts: Ints
    responses: Ints
    sampled: Ints
    scored: npt.NDArray[np.bool_]
    steps: Ints
    trajectories: Ints

    @classmethod
    def of(cls, samples: Sequence[Sample], minibatches: int) -> BatchTable:
        """The table of these samples, which have their rewards, cut into this many optimizer steps.

        Raises RuntimeFailure if a log-prob of a trained token is not finite.
        """
        rewards = []
        for sample in samples:
            assert sample.reward is not None, f"{sample.prompt_id} was not rewarded"
            _check_logprobs(sample)
            if not math.isfinite(sample.reward):
                raise RuntimeFailure(f"{sample.prompt_id}: reward.function returned {sample.reward}; return finite numbers")
            rewards.append(sample.reward)
        numbers = {group_id: number for number, group_id in enumerate(dict.fromkeys(s.group_id for s in samples))}
        trajectories = {each: number for number, each in enumerate(dict.fromkeys((s.group_id, s.index) for s in samples))}
        groups = np.array([numbers[s.group_id] for s in samples], np.int32)
        return cls(
            np.array(rewards),
            groups,
            np.array([len(s.prompt_ids) for s in samples], np.int32),
            np.array([len(s.response_ids) for s in samples], np.int32),
            np.array([s.sampled for s in samples], np.int32),
            np.array([s.old_logprobs is not None for s in samples]),
            # Groups may differ in size, for agents and if a checkpoint had another group_size.
            groups * minibatches // max(len(numbers), 1),
            np.array([trajectories[s.group_id, s.index] for s in samples], np.int32),
        )

    @property
    def unscored(self) -> bool:
        """Whether a response with tokens to train on lacks its old log-probs."""
        return bool((~self.scored & (self.responses > 0)).any())

    @property
    def trajectory_tokens(self) -> Ints:
        """For each sample, the sampled tokens of its whole trajectory."""
        totals = np.zeros(int(self.trajectories.max(initial=-1)) + 1, np.int32)
        np.add.at(totals, self.trajectories, self.sampled)
        return totals[self.trajectories]


@dataclass(frozen=True, slots=True)
class Minibatch:
    """This rank's part of an optimizer step. `members`: indices into the share; `passes`: its micro-batches, as indices into `members`.

    `trajectories`: those of the whole step, on all ranks, including trajectories without a trained token.
    """

    members: list[int]
    passes: list[list[int]]
    trajectories: int


@dataclass(frozen=True, slots=True)
class Share:
    """The samples of one data-parallel rank that have response tokens.

    `places`: their indices in the batch, ascending. `trajectory_tokens`: see `BatchTable`. `ids` holds each prompt followed by its
    response; the other columns over tokens hold response tokens alone. `old`: old log-probs, of scored samples alone; `teacher`: a
    teacher's, of the samples that are `taught`. `spans`: how many version spans a sample has, which together cover its response;
    `span_lengths` and `span_versions` have an entry for each span.
    """

    dp_rank: int
    minibatches: list[Minibatch]
    places: Ints
    trajectory_tokens: Ints
    prompts: Ints
    responses: Ints
    names: list[tuple[str, int]]
    ids: Ints
    mask: npt.NDArray[np.int8]
    behaviour: npt.NDArray[np.float32]
    scored: npt.NDArray[np.bool_]
    old: npt.NDArray[np.float32]
    old_versions: Ints
    spans: Ints
    span_lengths: Ints
    span_versions: Ints
    routes: list[Routes | None]
    taught: npt.NDArray[np.bool_]
    teacher: npt.NDArray[np.float32]
    topk: Ints
    candidates: Ints
    candidate_logprobs: npt.NDArray[np.float32]

    @classmethod
    def of(cls, batch: Sequence[Sample], places: list[int], dp_rank: int, minibatches: list[Minibatch], trajectory_tokens: Ints) -> Share:
        """The share that holds the samples at these indices of the batch. `trajectory_tokens`: of every sample of the batch."""
        samples = [batch[place] for place in places]
        spans = [span for s in samples for span in s.version_spans]
        return cls(
            dp_rank,
            minibatches,
            np.array(places, np.int32),
            trajectory_tokens[places],
            np.array([len(s.prompt_ids) for s in samples], np.int32),
            np.array([len(s.response_ids) for s in samples], np.int32),
            [(s.prompt_id, s.index) for s in samples],
            _joined([ids for s in samples for ids in (s.prompt_ids, s.response_ids)], np.int32),
            _joined([s.loss_mask for s in samples], np.int8),
            _joined([s.behaviour_logprobs for s in samples], np.float32),
            np.array([s.old_logprobs is not None for s in samples], np.bool_),
            _joined([s.old_logprobs for s in samples if s.old_logprobs is not None], np.float32),
            np.array([-1 if s.old_version is None else s.old_version for s in samples], np.int32),
            np.array([len(s.version_spans) for s in samples], np.int32),
            np.array([span.end - span.start for span in spans], np.int32),
            np.array([span.version for span in spans], np.int32),
            [s.routes for s in samples],
            np.array([s.teacher_logprobs is not None for s in samples], np.bool_),
            _joined([s.teacher_logprobs for s in samples if s.teacher_logprobs is not None], np.float32),
            np.array([len(s.candidates or ()) // max(len(s.response_ids), 1) for s in samples], np.int32),
            _joined([s.candidates for s in samples if s.candidates is not None], np.int32),
            _joined([s.candidate_logprobs for s in samples if s.candidate_logprobs is not None], np.float32),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the columns that have an entry for each token, routes included."""
        columns = (self.ids, self.mask, self.behaviour, self.old, self.teacher, self.candidates, self.candidate_logprobs)
        return sum(column.nbytes for column in columns) + sum(0 if each is None else each.nbytes for each in self.routes)

    def samples(self) -> list[Sample]:
        """The samples, with the fields that the trainer needs. Groups and rewards are missing: they are in the table."""
        ids, mask, behaviour, old = (_Reader(column) for column in (self.ids, self.mask, self.behaviour, self.old))
        teacher, named, likely = (_Reader(column) for column in (self.teacher, self.candidates, self.candidate_logprobs))
        lengths, versions = iter(self.span_lengths.tolist()), iter(self.span_versions.tolist())
        made = []
        for number, (prompt_id, index) in enumerate(self.names):
            prompt, response = int(self.prompts[number]), int(self.responses[number])
            sample = Sample(
                prompt_id,
                "",
                ids_of(ids.next("i", prompt)),
                index,
                response_ids=ids_of(ids.next("i", response)),
                loss_mask=mask_of(mask.next("b", response)),
                behaviour_logprobs=behaviour.next("f", response),
                routes=self.routes[number],
            )
            if self.scored[number]:
                sample.old_logprobs, sample.old_version = old.next("f", response), int(self.old_versions[number])
            if self.taught[number]:
                sample.teacher_logprobs = teacher.next("f", response)
            if candidates := int(self.topk[number]) * response:
                sample.candidates, sample.candidate_logprobs = named.next("i", candidates), likely.next("f", candidates)
            start = 0
            for _ in range(self.spans[number]):
                end = start + next(lengths)
                sample.version_spans.append(VersionSpan(start, end, next(versions)))
                start = end
            made.append(sample)
        return made


def deal(
    samples: Sequence[Sample], *, minibatches: int, tokens_per_microbatch: int, dp: int
) -> tuple[BatchTable, list[Callable[[], Share]]]:
    """The table of an update's samples, and for each of `dp` ranks a function that makes its share.

    `partition` deals out the samples of each optimizer step. Samples without response tokens are only in the table: they count in their
    groups and in the number of trajectories, but are not trained on. A step without sampled tokens is left out. Shares are created one
    at a time, because each copies the tokens of its samples.
    """
    table = BatchTable.of(samples, minibatches)
    lengths, trajectory_tokens = table.prompts + table.responses, table.trajectory_tokens
    steps: list[tuple[list[int], list[list[list[int]]], int]] = []
    for step in range(minibatches):
        members = np.flatnonzero(table.steps == step)
        places = [place for place in members.tolist() if table.responses[place]]
        if table.sampled[members].any():
            trajectories = len(np.unique(table.trajectories[members]))
            steps.append((places, partition(lengths[places].tolist(), tokens_per_microbatch, dp), trajectories))

    def share(rank: int) -> Share:
        found: list[int] = []
        parts = []
        for places, dealt, trajectories in steps:
            mine = sorted(i for micro in dealt[rank] for i in micro)
            number = {i: n for n, i in enumerate(mine)}
            passes = [[number[i] for i in micro] for micro in dealt[rank]]
            parts.append(Minibatch(list(range(len(found), len(found) + len(mine))), passes, trajectories))
            found += [places[i] for i in mine]
        return Share.of(samples, found, rank, parts, trajectory_tokens)

    return table, [partial(share, rank) for rank in range(dp)]


def _check_logprobs(sample: Sample) -> None:
    trained = np.asarray(sample.loss_mask, np.bool_)
    for what, logprobs in (
        ("the rollout engine", sample.behaviour_logprobs),
        ("old log-probs", sample.old_logprobs),
        ("the teacher", sample.teacher_logprobs),
    ):
        if logprobs is None:
            continue
        values = np.asarray(logprobs)
        if len(bad := np.flatnonzero(trained & ~np.isfinite(values))):
            raise RuntimeFailure(
                f"sample {sample.name}: {what} gave response token {bad[0]} the log-prob {values[bad[0]]:g}, which cannot be trained on; "
                "look at what sampled or scored it (rollout.top_k, rollout.top_p, logs/)"
            )


def _joined[T: np.generic](columns: list[array], dtype: type[T]) -> npt.NDArray[T]:
    """These arrays, one after another, as one array."""
    return np.concatenate([np.asarray(column, dtype) for column in columns]) if columns else np.zeros(0, dtype)


class _Reader:
    """Reads a column piece by piece."""

    def __init__(self, column: np.ndarray) -> None:
        self._column, self._place = column, 0

    def next(self, typecode: str, count: int) -> array:
        """The next `count` values."""
        begin, self._place = self._place, self._place + count
        return array(typecode, self._column[begin : self._place].tobytes())
