"""The state of a run that goes on, held in memory for its status page. `mtpctl status` reads the same from the run directory."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from mtpctl.telemetry.clock import steady_clock
from mtpctl.telemetry.history import Event, History
from mtpctl.telemetry.metrics_file import plain
from mtpctl.telemetry.run_directory import RunDirectory
from mtpctl.telemetry.runs import RunOverview
from mtpctl.telemetry.scale_requests import remembered

EVENTS = 30
"""The newest events, at most so many, are kept."""
TROUBLE = ("error", "alarm", "restart")
"""Kinds of events that the page lists as errors."""


class LiveStatus:
    """The newest of what telemetry was given.

    metrics: the newest value of each metric of the stage under way. waiting: what the run waits for, a line each. events: the newest
    events. restarts: a line for each restart of the trainer or of a replica.
    """

    def __init__(self, path: Path, totals: Mapping[str, int], history: History) -> None:
        """`path`: the run directory. `totals`: the number of steps of each stage. `history`: rows and events of earlier starts of the run,
        without the steps that are done again."""
        self.path, self.totals = path, totals
        self.stage, self.step, self.metrics = "", 0, dict[str, float]()
        self.waiting: Sequence[str] = ()
        self.events = deque(history.events, EVENTS)
        self.restarts = [event.message for event in history.events if event.kind == "restart"]
        self._trouble = deque((event for event in history.events if event.kind in TROUBLE), EVENTS)
        self._accuracy: float | None = None
        self._now = steady_clock()
        self._wrote = self._now()
        for row in history.rows:
            self.row(row.step, row.metrics, row.phase)
            self._wrote = row.time

    def row(self, step: int, metrics: Mapping[str, float], stage: str) -> None:
        """Take in the metrics of a step, or a part of them."""
        if stage != self.stage:
            self.stage, self.step, self.metrics = stage, step, {}
        self.step, self._wrote = max(self.step, step), self._now()
        self.metrics.update(metrics)
        self._accuracy = metrics.get("eval/accuracy", self._accuracy)

    def event(self, kind: str, message: str) -> None:
        """Take in an event."""
        event = Event(self._now(), kind, message)
        self.events.append(event)
        if kind == "restart":
            self.restarts.append(message)
        if kind in TROUBLE:
            self._trouble.append(event)

    def trouble(self) -> list[Event]:
        """The newest events of the kinds `TROUBLE`."""
        return list(self._trouble)

    def overview(self) -> RunOverview:
        """The run as `mtpctl runs` lists it."""
        reward, unfiltered = self.metrics.get("reward/mean"), self.metrics.get("reward/unfiltered_mean")
        age, steps = max(0.0, self._now() - self._wrote), self.totals.get(self.stage)
        replicas = int(self.metrics["rollout/replicas"]) if "rollout/replicas" in self.metrics else None
        asked = remembered(RunDirectory(self.path))
        restarts = list(self.restarts)
        return RunOverview(
            self.path, "running", self.stage, self.step, steps, reward, unfiltered, self._accuracy, age, restarts, replicas, asked
        )

    def as_json(self) -> dict[str, object]:
        """All of it as values that JSON can hold."""
        found = self.overview()
        return asdict(found) | {
            "path": str(self.path),
            "reward": None if found.reward is None else plain(found.reward),
            "unfiltered_reward": None if found.unfiltered_reward is None else plain(found.unfiltered_reward),
            "accuracy": None if found.accuracy is None else plain(found.accuracy),
            "waiting": list(self.waiting),
            "errors": [asdict(event) for event in self.trouble()],
            "events": [asdict(event) for event in list(self.events)],
            "metrics": {name: plain(value) for name, value in list(self.metrics.items())},
        }
