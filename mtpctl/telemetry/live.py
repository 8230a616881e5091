"""The state of a run that goes on, held in memory for its status page. `mtpctl status` reads the same from the run directory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

from mtpctl.telemetry.charts import page
from mtpctl.telemetry.history import Event, History
from mtpctl.telemetry.metrics_file import plain
from mtpctl.telemetry.names import describe, format_duration, format_value
from mtpctl.telemetry.run_directory import RunDirectory
from mtpctl.telemetry.runs import RunOverview
from mtpctl.telemetry.scale_requests import remembered

# Timestamps of a run, which are not affected if the clock of the machine is adjusted.


def steady_clock() -> Callable[[], float]:
    """A function that returns seconds since 1970: the time at creation plus the monotonic time elapsed since."""
    began, mark = time.time(), time.monotonic()
    return lambda: began + (time.monotonic() - mark)


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


# The status page of a run that goes on, as HTML without scripts.


@dataclass(frozen=True)
class ReplicaCounts:
    """How many rollout replicas serve, how many are asked for, and how many were restarted after a failure.

    least and most: the bounds on the number (`rollout.replicas`), which are equal where the recipe has a plain number.
    """

    serving: int
    asked: int
    least: int
    most: int
    restarts: int

    def told(self) -> str:
        """In words: `2 of 3 (1 to 4) serve, 0 started anew`."""
        bounds = "" if self.least == self.most else f" ({self.least} to {self.most})"
        return f"{self.serving} of {self.asked}{bounds} serve, {self.restarts} started anew"


def render(live: LiveStatus, replicas: ReplicaCounts | None) -> str:
    """The page as HTML. `replicas`: None before the engines are started."""
    found = live.overview()
    of = "" if found.steps is None else f" of {found.steps}"
    facts = [
        ("state", "; ".join(live.waiting) or found.state),
        ("stage", found.stage or "–"),
        ("step", f"{found.step}{of}" if found.stage else "–"),
        ("reward", "–" if found.reward is None else format_value(found.reward, "number")),
        ("reward, unfiltered", "–" if found.unfiltered_reward is None else format_value(found.unfiltered_reward, "number")),
        ("held-out accuracy", "–" if found.accuracy is None else format_value(found.accuracy, "share")),
        ("newest row", f"{format_duration(found.age_s)} ago"),
        ("rollout replicas", "–" if replicas is None else replicas.told()),
        ("last restart", found.restarts[-1] if found.restarts else "none"),
    ]
    metrics = ((name, format_value(value, describe(name).unit), describe(name).meaning) for name, value in sorted(live.metrics.items()))
    trouble, events = live.trouble(), list(live.events)
    parts = [
        _table((), facts),
        _events("Newest errors", trouble) if trouble else "",
        _events("Newest events", events),
        f"<h2>Metrics</h2>{_table(('metric', 'newest', ''), metrics)}" if live.metrics else "",
    ]
    return page(live.path.name, str(live.path), "".join(parts), "/status.json · /metrics for Prometheus")


def _events(title: str, events: Sequence[Event]) -> str:
    rows = ((time.strftime("%m-%d %H:%M:%S", time.localtime(event.time)), event.kind, event.message) for event in reversed(events))
    return f"<h2>{title}</h2>{_table(('time', 'kind', ''), rows)}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    above = f"<thead><tr>{top}</tr></thead>" if head else ""
    return f'<table class="left">{above}<tbody>{body}</tbody></table>'
