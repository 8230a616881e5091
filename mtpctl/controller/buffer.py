"""The sample buffer between rollout and trainer: it collects samples into groups, hands out whole groups, and is part of a checkpoint."""

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
from mtpctl.samples import Sample


@dataclass
class Group:
    """The `size` responses to one prompt. `number` counts the prompts that were drawn, from 0, and orders deterministic runs.

    `version` is the weight version that was published when the group was sent out. A group that got too old is discarded, which sets
    `unwanted`, and its prompt is sent out again as a new group of the same number; `retries` counts how often that has happened.
    """

    number: int
    problem: Problem
    size: int
    samples: list[Sample] = field(default_factory=list)
    version: int = 0
    retries: int = 0
    unwanted: asyncio.Event = field(default_factory=asyncio.Event, compare=False)

    @property
    def group_id(self) -> str:
        """A name that differs for each retry, so that late samples of a discarded group are not taken for those of the next one."""
        return f"{self.number}.{self.retries}" if self.retries else str(self.number)

    @property
    def oldest(self) -> int:
        """Weight version of the oldest token; for a group that is not complete, the oldest version that a token can have."""
        versions = [span.version for sample in self.samples for part in sample.parts for span in part.version_spans]
        return min(versions) if self.complete and versions else self.version

    @property
    def complete(self) -> bool:
        return len(self.samples) == self.size


class SampleBuffer:
    """Groups in flight, and complete groups that wait for the trainer.

    The trainer gets groups with the oldest tokens first, and of equally old ones the one that was completed first; if `ordered`, in the
    order in which their prompts were drawn. A group is in flight from `begin` until it has its rewards and is `put` or dropped.
    `requeued` holds groups whose prompts are to be sent out again: those that got too old, and those that a checkpoint left unfinished.

    Groups that were taken are kept until a checkpoint holds their update (`saved`): the trainer may be lost, and its updates with it.
    """

    def __init__(self, *, ordered: bool = False) -> None:
        self.requeued: list[Group] = []
        self._ordered = ordered
        self._ready: list[Group] = []
        self._open: dict[str, Group] = {}
        self._taken: list[tuple[int, Group]] = []
        self._changed = asyncio.Condition()

    @property
    def pending(self) -> int:
        """Number of groups in flight or waiting for the trainer."""
        return len(self._open) + len(self._ready)

    @property
    def ready(self) -> int:
        """Number of groups that wait for the trainer."""
        return len(self._ready)

    def begin(self, group: Group) -> None:
        """Note that the group is sent out, and in flight."""
        self._open[group.group_id] = group

    def problem_of(self, sample: Sample) -> Problem | None:
        """The problem that the sample is a response to; None where its group is in flight no more."""
        group = self._open.get(sample.group_id)
        return None if group is None else group.problem

    def add(self, sample: Sample) -> Group | None:
        """Add a finished sample to its group. Returns the group where it is complete now: the caller puts or drops it.

        A sample whose group is not in flight is ignored.
        """
        group = self._open.get(sample.group_id)
        if group is None:
            return None
        group.samples.append(sample)
        if not group.complete:
            return None
        group.samples.sort(key=lambda s: s.index)
        return group

    def expire(self, least: int) -> int:
        """Discard and requeue all groups that have, or may get, tokens of versions before `least`. Returns how many."""
        old = [group for group in (*self._open.values(), *self._ready) if group.oldest < least]
        for group in old:
            group.unwanted.set()
            self._open.pop(group.group_id, None)
            self.requeued.append(Group(group.number, group.problem, group.size, retries=group.retries + 1))
        self._ready = [group for group in self._ready if not group.unwanted.is_set()]
        self.requeued.sort(key=lambda group: group.number)
        return len(old)

    async def put(self, group: Group) -> None:
        """Make a complete group available to the trainer, unless it was discarded meanwhile."""
        async with self._changed:
            if group.unwanted.is_set():
                return
            self._open.pop(group.group_id, None)
            # Behind its equals: of these the one that was completed first comes first.
            insort(self._ready, group, key=self._order)
            self._changed.notify_all()

    def _order(self, group: Group) -> tuple[int, int]:
        return (group.number, 0) if self._ordered else (group.oldest, -group.retries)

    async def drop(self, group: Group) -> bool:
        """Remove a complete group that is not to be trained on. Returns whether it was still in flight, and not discarded before."""
        async with self._changed:
            self._changed.notify_all()
            return self._open.pop(group.group_id, None) is not None

    async def wait(self, count: int, *, due: int = -1, later: int = 0) -> None:
        """Return once `count` groups can be taken, and if `ordered`, once no group that was drawn before them is missing.

        A batch also waits for retried groups of version `due` or before, which would be too old for the next version, except for `later`
        of them, which the batches after this one can still train on.
        """

        def batch_is_ready() -> bool:
            if len(self._ready) < count:
                return False
            if self._ordered:
                return all(group.number > self._ready[count - 1].number for group in self.unfinished())

            def due_in(groups: Iterable[Group]) -> int:
                return sum(bool(group.retries) and group.oldest <= due for group in groups)

            ready, in_flight = due_in(self._ready), due_in(self._open.values())
            return ready >= min(ready + in_flight - later, count)

        async with self._changed:
            await self._changed.wait_for(batch_is_ready)

    def take(self, count: int, step: int = 0) -> list[Group]:
        """Remove and return the next `count` groups, for which the caller has waited, for the update `step`."""
        taken, self._ready = self._ready[:count], self._ready[count:]
        self._taken += [(step, group) for group in taken]
        return taken

    def saved(self, step: int) -> None:
        """Forget the groups of updates up to `step`, which a checkpoint holds."""
        self._taken = [(of, group) for of, group in self._taken if of > step]

    async def take_back(self) -> int:
        """Make the groups of updates that no checkpoint holds available again. Returns how many.

        If `ordered`, all prompts are sent out again: under the weights that they were sampled by before, so that the updates are the same.
        """
        async with self._changed:
            back, self._taken = [group for _, group in self._taken], []
            self._ready += back
            if self._ordered:
                self.expire(sys.maxsize)
            self._ready.sort(key=self._order)
            self._changed.notify_all()
        return len(back)

    def unfinished(self) -> list[Group]:
        """Groups in flight and requeued ones, in the order in which they were drawn: a restarted run sends their prompts out again."""
        return sorted([*self._open.values(), *self.requeued], key=lambda g: g.number)

    def saving(self, path: Path) -> Callable[[], Entry]:
        """What writes the buffer as it is now, in any thread: the waiting groups with their samples, and the problems of unfinished ones.

        It returns the file's size and checksum. One line of JSON per group, written atomically. Complete groups are immutable.
        """
        return partial(_write, path, [(group, group.samples) for group in self._ready] + [(group, []) for group in self.unfinished()])

    def save(self, path: Path) -> None:
        """Write the buffer here and now."""
        self.saving(path)()

    @staticmethod
    def load(path: Path) -> tuple[list[Group], list[Group]]:
        """Read what `save` wrote: the complete groups, and the unfinished ones, whose prompts have to be sent out again."""
        complete: list[Group] = []
        unfinished: list[Group] = []
        for line in path.read_text().splitlines():
            data = json.loads(line)
            samples = [Sample.from_dict(s) for s in data["samples"]]
            group = Group(data["number"], Problem.from_json(data["problem"]), data["size"], samples, retries=data.get("again", 0))
            (complete if group.complete else unfinished).append(group)
        return complete, unfinished


def _write(path: Path, groups: list[tuple[Group, list[Sample]]]) -> Entry:
    aside, checksum = path.with_suffix(".partial"), Checksum()
    with aside.open("wb") as file:
        for group, complete in groups:
            samples = [s.to_dict(packed=True) for s in complete]
            problem = group.problem.to_json()
            line = {"number": group.number, "problem": problem, "size": group.size, "again": group.retries, "samples": samples}
            encoded = (json.dumps(line) + "\n").encode()
            checksum.update(encoded)
            file.write(encoded)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    return checksum.entry
