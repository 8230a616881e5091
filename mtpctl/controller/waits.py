"""What a run waits for, so that loading, compiling and saving are seen to go on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mtpctl.cluster.process import newest_line

LOOK_S = 1.0
"""Seconds between two looks at the logs."""


@dataclass(eq=False)
class Wait:
    """One wait: its reason, its actors, and its start. `begun` is wall-clock time, which may be adjusted during the wait."""

    what: str
    actors: Sequence[str] = ()
    begun: float = field(default_factory=time.time)
    _mark: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """How long it has taken."""
        return time.monotonic() - self._mark

    def told(self, logs: Path) -> str:
        """`trainer: loading, 12 s`, and the newest line that one of the actors has printed since, such as a share of weights loaded."""
        lines = [line for actor in self.actors if (line := newest_line(logs, actor, since=self.begun))]
        said = f" · {lines[-1]}" if lines else ""
        return f"{self.what}, {self.seconds:.0f} s{said}"


class Waits:
    """The waits that are under way. `tell` gets a line for each while `run` runs, and an empty list once there are none."""

    def __init__(self, tell: Callable[[Sequence[str]], None], logs: Path) -> None:
        self._tell, self._logs, self._waits = tell, logs, list[Wait]()

    @contextlib.contextmanager
    def on(self, what: str, *actors: str) -> Iterator[Wait]:
        """A wait as long as the block runs. `actors` by their names, as their logs have them."""
        wait = Wait(what, actors)
        self._waits.append(wait)
        try:
            yield wait
        finally:
            self._waits.remove(wait)
            if not self._waits:
                self._tell([])

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if self._waits:
                self._tell([wait.told(self._logs) for wait in self._waits])
