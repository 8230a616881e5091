"""Groups between rollout and trainer: collected sample by sample, handed out whole, kept over a restart."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from mtpctl.data import Problem
from mtpctl.samples import Sample


@dataclass
class Group:
    """All responses to one drawing of one prompt. `number` counts drawings from 0 and orders deterministic runs."""

    number: int
    problem: Problem
    size: int
    samples: list[Sample] = field(default_factory=list)

    @property
    def group_id(self) -> str:
        return str(self.number)

    @property
    def complete(self) -> bool:
        return len(self.samples) == self.size


class SampleBuffer:
    """Complete groups that wait for the trainer, in the order they were completed or, if `ordered`, drawn.

    A group that was sent out is in flight until it is `put` or `drop`ped, its rewards included. `again` holds groups that a
    checkpoint left unfinished and that were not sent out anew yet.
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

    def add(self, sample: Sample) -> Group | None:
        """A sample came back. Returns its group once that is complete; the caller puts it or drops it."""
        group = self._open[sample.group_id]
        group.samples.append(sample)
        if not group.complete:
            return None
        group.samples.sort(key=lambda s: s.index)
        return group

    async def put(self, group: Group) -> None:
        """A complete group is ready to be trained on."""
        async with self._changed:
            self._open.pop(group.group_id, None)
            self._ready.append(group)
            if self._ordered:
                self._ready.sort(key=lambda g: g.number)
            self._changed.notify_all()

    async def drop(self, group: Group) -> None:
        """A complete group is not to be trained on."""
        async with self._changed:
            del self._open[group.group_id]
            self._changed.notify_all()

    async def take(self, count: int) -> list[Group]:
        """The next `count` groups, waiting until there are as many, and if `ordered` until none that was drawn before them is missing."""

        def there() -> bool:
            if len(self._ready) < count:
                return False
            return not self._ordered or all(group.number > self._ready[count - 1].number for group in self.unfinished())

        async with self._changed:
            await self._changed.wait_for(there)
            taken, self._ready = self._ready[:count], self._ready[count:]
            return taken

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
                file.write(json.dumps({"number": group.number, "problem": problem, "size": group.size, "samples": samples}) + "\n")
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
            group = Group(data["number"], Problem(*data["problem"]), data["size"], samples)
            (complete if group.complete else again).append(group)
        return complete, again
