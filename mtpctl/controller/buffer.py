"""The sample buffer between rollout and trainer. It collects samples into groups, and is saved in checkpoints."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mtpctl.checkpoint.listing import Checksum, Entry
from mtpctl.data.problems import Problem
from mtpctl.samples import Sample, Unwanted


@dataclass
class Group:
    """The `size` responses to one prompt.

    A group that becomes too old is discarded: `unwanted` is set, and its prompt is sent out again as a new group with the same `number` and
    `retries` + 1.

    Attributes:
        number: index of the prompt in the order of drawing. Deterministic runs train on groups in this order.
        version: the latest published weight version when the group was sent out.
    """

    number: int
    problem: Problem
    size: int
    samples: list[Sample] = field(default_factory=list)
    version: int = 0
    retries: int = 0
    unwanted: Unwanted = field(default_factory=Unwanted, compare=False)

    @property
    def group_id(self) -> str:
        """Unique for each retry, so that late samples of a discarded group are not added to its successor."""
        return f"{self.number}.{self.retries}" if self.retries else str(self.number)

    @property
    def oldest_version(self) -> int:
        """Weight version of the oldest token. If the group is incomplete or has no tokens: `version`, which is a lower bound."""
        versions = [span.version for sample in self.samples for part in sample.trajectory for span in part.version_spans]
        return min(versions) if self.is_complete and versions else self.version

    @property
    def is_complete(self) -> bool:
        return len(self.samples) == self.size


class SampleBuffer:
    """Groups in flight, and complete groups that wait for the trainer.

    A group is in flight from `begin` until it is `put` (complete and rewarded) or dropped. The trainer gets the groups with the oldest
    tokens first. Among equally old groups, retried ones come first, then the order of completion decides. If `ordered`, the trainer gets
    groups in the order in which their prompts were drawn.

    Groups that the trainer took are retained until a checkpoint contains their update (`forget`), in case the trainer is lost.

    Attributes:
        requeued_groups: groups whose prompts are sent out again, because they became too old or were unfinished in a checkpoint.
    """

    def __init__(self, *, ordered: bool = False) -> None:
        self.requeued_groups: list[Group] = []
        self._ordered = ordered
        self._ready_groups: list[Group] = []
        self._groups_in_flight: dict[str, Group] = {}
        self._taken_groups: list[tuple[int, Group]] = []
        self._changed = asyncio.Condition()

    @property
    def num_pending(self) -> int:
        """Number of groups in flight or waiting for the trainer."""
        return len(self._groups_in_flight) + len(self._ready_groups)

    @property
    def num_ready(self) -> int:
        """Number of groups that wait for the trainer."""
        return len(self._ready_groups)

    def begin(self, group: Group) -> None:
        """Mark a group as in flight."""
        self._groups_in_flight[group.group_id] = group

    def problem_of(self, sample: Sample) -> Problem | None:
        """The problem that the sample answers; None if its group is no longer in flight."""
        group = self._groups_in_flight.get(sample.group_id)
        return None if group is None else group.problem

    def add(self, sample: Sample) -> Group | None:
        """Add a sample to its group if that is in flight. Returns the group if it is now complete: the caller puts or drops it."""
        group = self._groups_in_flight.get(sample.group_id)
        if group is None:
            return None
        group.samples.append(sample)
        if not group.is_complete:
            return None
        group.samples.sort(key=lambda sample: sample.index)
        return group

    def expire(self, min_version: int) -> int:
        """Discard and requeue all groups that have, or may get, tokens of versions before `min_version`. Returns their number."""
        expired_groups = [group for group in (*self._groups_in_flight.values(), *self._ready_groups) if group.oldest_version < min_version]
        for group in expired_groups:
            group.unwanted.set()
            self._groups_in_flight.pop(group.group_id, None)
            self.requeued_groups.append(Group(group.number, group.problem, group.size, retries=group.retries + 1))
        self._ready_groups = [group for group in self._ready_groups if not group.unwanted.is_set()]
        self.requeued_groups.sort(key=lambda group: group.number)
        return len(expired_groups)

    async def put(self, group: Group) -> None:
        """Make a complete group available to the trainer, unless it was discarded."""
        async with self._changed:
            if group.unwanted.is_set():
                return
            self._groups_in_flight.pop(group.group_id, None)
            # `insort` inserts after equal keys, so groups with equal keys stay in the order of completion.
            insort(self._ready_groups, group, key=self._order)
            self._changed.notify_all()

    def _order(self, group: Group) -> tuple[int, int]:
        return (group.number, 0) if self._ordered else (group.oldest_version, -group.retries)

    async def drop(self, group: Group) -> bool:
        """Remove a complete group without training on it. Returns whether it was still in flight."""
        async with self._changed:
            self._changed.notify_all()
            return self._groups_in_flight.pop(group.group_id, None) is not None

    async def wait(self, count: int, *, due_version: int = -1, max_deferred: int = 0) -> None:
        """Wait until `count` groups can be taken.

        If `ordered`, also waits for every group with a smaller number than the last one of the batch.

        Otherwise, also waits for due groups: retried groups that have, or may get, tokens of `due_version` or earlier, which the next
        weight version makes too old. It does not wait for the last `max_deferred` of them: later batches can still take these
        before that version is published.
        """

        def batch_is_ready() -> bool:
            if len(self._ready_groups) < count:
                return False
            if self._ordered:
                return all(group.number > self._ready_groups[count - 1].number for group in self.unfinished_groups())

            def count_due(groups: Iterable[Group]) -> int:
                return sum(bool(group.retries) and group.oldest_version <= due_version for group in groups)

            ready_due, in_flight_due = count_due(self._ready_groups), count_due(self._groups_in_flight.values())
            return ready_due >= min(ready_due + in_flight_due - max_deferred, count)

        async with self._changed:
            await self._changed.wait_for(batch_is_ready)

    def take(self, count: int, step: int = 0) -> list[Group]:
        """Remove and return the next `count` groups for the update `step`. Call `wait` first."""
        batch, self._ready_groups = self._ready_groups[:count], self._ready_groups[count:]
        self._taken_groups += [(step, group) for group in batch]
        return batch

    def forget(self, step: int) -> None:
        """Forget the groups of updates up to `step`, which a checkpoint contains."""
        self._taken_groups = [(update, group) for update, group in self._taken_groups if update > step]

    async def restore_taken_groups(self) -> int:
        """Put the groups of updates that no checkpoint contains back into the buffer. Returns the number of groups.

        If `ordered`, all prompts are sent out again instead, under the weights that sampled the lost responses, so that the repeated
        updates equal the lost ones.
        """
        async with self._changed:
            groups, self._taken_groups = [group for _, group in self._taken_groups], []
            self._ready_groups += groups
            if self._ordered:
                self.expire(sys.maxsize)
            self._ready_groups.sort(key=self._order)
            self._changed.notify_all()
        return len(groups)

    def unfinished_groups(self) -> list[Group]:
        """Groups in flight and requeued groups, in the order of drawing. A resumed run sends their prompts out again."""
        return sorted([*self._groups_in_flight.values(), *self.requeued_groups], key=lambda group: group.number)

    def snapshot_writer(self, path: Path) -> Callable[[], Entry]:
        """Return a function that atomically writes a snapshot of the buffer, in any thread, and returns the file's size and checksum."""
        return partial(
            _write, path, [(group, group.samples) for group in self._ready_groups] + [(group, []) for group in self.unfinished_groups()]
        )

    @staticmethod
    def load(path: Path) -> tuple[list[Group], list[Group]]:
        """Read a saved buffer. Returns its complete groups, and the unfinished ones, whose prompts must be sent out again."""
        complete: list[Group] = []
        unfinished: list[Group] = []
        for line in path.read_text().splitlines():
            data = json.loads(line)
            samples = [Sample.from_dict(sample) for sample in data["samples"]]
            group = Group(data["number"], Problem.from_json(data["problem"]), data["size"], samples, retries=data.get("again", 0))
            (complete if group.is_complete else unfinished).append(group)
        return complete, unfinished


def _write(path: Path, groups: list[tuple[Group, list[Sample]]]) -> Entry:
    """Write one line of JSON per group: ready groups with their samples, unfinished groups without."""
    partial_file, checksum = path.with_suffix(".partial"), Checksum()
    with partial_file.open("wb") as file:
        for group, samples in groups:
            sample_rows = [sample.to_dict(packed=True) for sample in samples]
            problem = group.problem.to_json()
            line = {"number": group.number, "problem": problem, "size": group.size, "again": group.retries, "samples": sample_rows}
            encoded = (json.dumps(line) + "\n").encode()
            checksum.update(encoded)
            file.write(encoded)
        file.flush()
        os.fsync(file.fileno())
    partial_file.replace(path)
    return checksum.entry
