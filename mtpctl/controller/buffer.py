"""Groups between rollout and trainer: collected sample by sample, handed out whole, kept over a restart."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from mtpctl.data.problems import Problem
from mtpctl.samples import Sample


@dataclass
class Group:
    """All responses to one drawing of one prompt. `number` counts drawings from 0 and orders deterministic runs.

    `version` is the weight version that was published when it was sent out, `again` how often that had been before: it was given up as
    too old each time, which sets `unwanted`.
    """

    number: int
    problem: Problem
    size: int
    samples: list[Sample] = field(default_factory=list)
    version: int = 0
    again: int = 0
    unwanted: asyncio.Event = field(default_factory=asyncio.Event, compare=False)

    @property
    def group_id(self) -> str:
        """Another one each time that it is sent out: what still comes of the time before is told apart by it."""
        return f"{self.number}.{self.again}" if self.again else str(self.number)

    @property
    def oldest(self) -> int:
        """Weight version of its oldest token; where some are still to come, the oldest that one can have."""
        versions = [span.version for sample in self.samples for span in sample.version_spans]
        return min(versions) if self.complete and versions else self.version

    @property
    def complete(self) -> bool:
        return len(self.samples) == self.size


class SampleBuffer:
    """Complete groups that wait for the trainer: the oldest weights first, then in the order they were completed; if `ordered`, as drawn.

    A group that was sent out is in flight until it is `put` or `drop`ped, its rewards included. `again` holds groups that a
    checkpoint left unfinished, or that got too old, and that were not sent out anew yet.
    """

    def __init__(self, *, ordered: bool = False) -> None:
        self.again: list[Group] = []
        self._ordered = ordered
        self._ready: list[Group] = []
        self._open: dict[str, Group] = {}
        self._changed = asyncio.Condition()

    @property
    def pending(self) -> int:
        """Groups in flight or waiting."""
        return len(self._open) + len(self._ready)

    @property
    def ready(self) -> int:
        """Groups waiting for the trainer."""
        return len(self._ready)

    def begin(self, group: Group) -> None:
        """A group is sent out."""
        self._open[group.group_id] = group

    def wants(self, sample: Sample) -> bool:
        """Whether the sample's group is in flight. One that was given up is not."""
        return sample.group_id in self._open

    def add(self, sample: Sample) -> Group | None:
        """A sample came back. Returns its group once that is complete, which the caller puts or drops; None where it is given up."""
        group = self._open.get(sample.group_id)
        if group is None:
            return None
        group.samples.append(sample)
        if not group.complete:
            return None
        group.samples.sort(key=lambda s: s.index)
        return group

    def expire(self, least: int) -> int:
        """Give up all groups with tokens of weights before version `least`: they are to be sent out again. Returns how many they are."""
        old = [group for group in (*self._open.values(), *self._ready) if group.oldest < least]
        for group in old:
            group.unwanted.set()
            self._open.pop(group.group_id, None)
            self.again.append(Group(group.number, group.problem, group.size, again=group.again + 1))
        self._ready = [group for group in self._ready if not group.unwanted.is_set()]
        self.again.sort(key=lambda group: group.number)
        return len(old)

    async def put(self, group: Group) -> None:
        """A complete group is ready to be trained on, unless it was given up meanwhile."""
        async with self._changed:
            if group.unwanted.is_set():
                return
            self._open.pop(group.group_id, None)
            self._ready.append(group)
            # Sorting is stable: of equals, the one that was completed first.
            self._ready.sort(key=(lambda g: g.number) if self._ordered else (lambda g: (g.oldest, -g.again)))
            self._changed.notify_all()

    async def drop(self, group: Group) -> bool:
        """A complete group is not to be trained on. Returns whether it was in flight: False where it was given up meanwhile."""
        async with self._changed:
            self._changed.notify_all()
            return self._open.pop(group.group_id, None) is not None

    async def take(self, count: int, *, due: int = -1, later: int = 0) -> list[Group]:
        """The next `count` groups, waiting until there are as many, and if `ordered` until none that was drawn before them is missing.

        Groups that were sent out again and are of version `due` or before are waited for too, except for `later` of them, which the
        batches after this one can still take.
        """

        def there() -> bool:
            if len(self._ready) < count:
                return False
            if self._ordered:
                return all(group.number > self._ready[count - 1].number for group in self.unfinished())
            ready, coming = ([g for g in groups if g.again and g.oldest <= due] for groups in (self._ready, self._open.values()))
            return len(ready) >= min(len(ready) + len(coming) - later, count)

        async with self._changed:
            await self._changed.wait_for(there)
            taken, self._ready = self._ready[:count], self._ready[count:]
            return taken

    def give_back(self, groups: list[Group]) -> None:
        """Groups that were taken, and that nobody trains on: they are next again."""
        self._ready[:0] = groups

    def unfinished(self) -> list[Group]:
        """Groups in flight and those still to be sent out anew, to be asked for after a restart, in the order they were drawn."""
        return sorted([*self._open.values(), *self.again], key=lambda g: g.number)

    def save(self, path: Path) -> None:
        """Write the waiting groups, and the problems of the unfinished ones, one line each; whole or not at all."""
        aside = path.with_suffix(".partial")
        kept = [(group, group.samples) for group in self._ready] + [(group, []) for group in self.unfinished()]
        with aside.open("w") as file:
            for group, held in kept:
                problem = [group.problem.prompt_id, group.problem.prompt, group.problem.answer, group.problem.solution]
                samples = [s.to_dict() for s in held]
                line = {"number": group.number, "problem": problem, "size": group.size, "again": group.again, "samples": samples}
                file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)

    @staticmethod
    def load(path: Path) -> tuple[list[Group], list[Group]]:
        """What `save` wrote: groups that are complete, and groups that have to be asked for again."""
        complete: list[Group] = []
        again: list[Group] = []
        for line in path.read_text().splitlines():
            data = json.loads(line)
            samples = [Sample.from_dict(s) for s in data["samples"]]
            group = Group(data["number"], Problem(*data["problem"]), data["size"], samples, again=data.get("again", 0))
            (complete if group.complete else again).append(group)
        return complete, again
