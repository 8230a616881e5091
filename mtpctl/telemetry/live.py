"""The live state of a run in memory, and its status page. `mtpctl status` reads the same state from the run directory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

from mtpctl.telemetry.charts import page
from mtpctl.telemetry.metrics_file import ERROR_KINDS, Event, History, plain
from mtpctl.telemetry.names import describe, format_duration, format_value
from mtpctl.telemetry.run_directory import RunDirectory
from mtpctl.telemetry.runs import RunOverview
from mtpctl.telemetry.scale_requests import remembered

EVENTS = 30
"""Number of newest events to keep."""


def steady_clock() -> Callable[[], float]:
    """A function that returns seconds since 1970, unaffected by adjustments of the machine's clock."""
    began, mark = time.time(), time.monotonic()
    return lambda: began + (time.monotonic() - mark)


class LiveStatus:
    """The newest state of a run.

    Attributes:
        metrics: the newest value of each metric of the current stage.
        waiting: what the run waits for, one line each.
        events: the newest events.
        restarts: one line for each restart of the trainer or of a replica.
    """

    def __init__(self, path: Path, totals: Mapping[str, int], history: History) -> None:
        """`path`: the run directory. `totals`: the number of steps of each stage. `history`: earlier sessions, without repeated steps."""
        self.path, self.totals = path, totals
        self.stage, self.step, self.metrics = "", 0, dict[str, float]()
        self.waiting: Sequence[str] = ()
        self.events = deque(history.events, EVENTS)
        self.restarts = [event.message for event in history.events if event.kind == "restart"]
        self._errors = deque((event for event in history.events if event.kind in ERROR_KINDS), EVENTS)
        self._accuracy: float | None = None
        self._unseen_accuracy: float | None = None
        self._now = steady_clock()
        self._newest_row = self._now()
        for row in history.rows:
            self.row(row.step, row.metrics, row.phase)
            self._newest_row = row.time

    def row(self, step: int, metrics: Mapping[str, float], stage: str) -> None:
        if stage != self.stage:
            self.stage, self.step, self.metrics = stage, step, {}
        self.step, self._newest_row = max(self.step, step), self._now()
        self.metrics.update(metrics)
        self._accuracy = metrics.get("eval/accuracy", self._accuracy)
        self._unseen_accuracy = metrics.get("eval/unseen_accuracy", self._unseen_accuracy)

    def event(self, kind: str, message: str) -> None:
        event = Event(self._now(), kind, message)
        self.events.append(event)
        if kind == "restart":
            self.restarts.append(message)
        if kind in ERROR_KINDS:
            self._errors.append(event)

    def errors(self) -> list[Event]:
        """The newest events of `ERROR_KINDS`."""
        return list(self._errors)

    def overview(self) -> RunOverview:
        """The run as `mtpctl runs` lists it."""
        reward, unfiltered = self.metrics.get("reward/mean"), self.metrics.get("reward/unfiltered_mean")
        age, steps = max(0.0, self._now() - self._newest_row), self.totals.get(self.stage)
        replicas = int(self.metrics["rollout/replicas"]) if "rollout/replicas" in self.metrics else None
        requested = remembered(RunDirectory(self.path))
        restarts = list(self.restarts)
        return RunOverview(
            self.path,
            "running",
            self.stage,
            self.step,
            steps,
            reward,
            unfiltered,
            self._accuracy,
            age,
            restarts,
            replicas,
            requested,
            unseen_accuracy=self._unseen_accuracy,
        )

    def as_json(self) -> dict[str, object]:
        """The whole state, JSON-serializable."""
        overview = self.overview()
        return asdict(overview) | {
            "path": str(self.path),
            "reward": None if overview.reward is None else plain(overview.reward),
            "unfiltered_reward": None if overview.unfiltered_reward is None else plain(overview.unfiltered_reward),
            "accuracy": None if overview.accuracy is None else plain(overview.accuracy),
            "unseen_accuracy": None if overview.unseen_accuracy is None else plain(overview.unseen_accuracy),
            "waiting": list(self.waiting),
            "errors": [asdict(event) for event in self.errors()],
            "events": [asdict(event) for event in list(self.events)],
            "metrics": {name: plain(value) for name, value in list(self.metrics.items())},
        }


@dataclass(frozen=True)
class ReplicaCounts:
    """Rollout replicas: in service, requested, the bounds of `rollout.replicas` (equal for a number), and restarts after failures."""

    serving: int
    asked: int
    least: int
    most: int
    restarts: int

    def __str__(self) -> str:
        """`2 of 3 (1 to 4) serve, 0 restarted`."""
        bounds = "" if self.least == self.most else f" ({self.least} to {self.most})"
        return f"{self.serving} of {self.asked}{bounds} serve, {self.restarts} restarted"


def render_status(live: LiveStatus, replicas: ReplicaCounts | None) -> str:
    """The status page as HTML without scripts. `replicas` is None before the engines start."""
    overview = live.overview()
    total = "" if overview.steps is None else f" of {overview.steps}"
    facts = [
        ("state", "; ".join(live.waiting) or overview.state),
        ("stage", overview.stage or "–"),
        ("step", f"{overview.step}{total}" if overview.stage else "–"),
        ("reward", "–" if overview.reward is None else format_value(overview.reward, "number")),
        ("reward, unfiltered", "–" if overview.unfiltered_reward is None else format_value(overview.unfiltered_reward, "number")),
        ("held-out accuracy", "–" if overview.accuracy is None else format_value(overview.accuracy, "share")),
        *([] if overview.unseen_accuracy is None else [("unseen prompts", format_value(overview.unseen_accuracy, "share"))]),
        ("newest row", f"{format_duration(overview.age_s)} ago"),
        ("rollout replicas", "–" if replicas is None else str(replicas)),
        ("last restart", overview.restarts[-1] if overview.restarts else "none"),
    ]
    metrics = ((name, format_value(value, describe(name).unit), describe(name).meaning) for name, value in sorted(live.metrics.items()))
    errors = live.errors()
    parts = [
        _table((), facts),
        _events("Newest errors", errors) if errors else "",
        _events("Newest events", list(live.events)),
        f"<h2>Metrics</h2>{_table(('metric', 'newest', ''), metrics)}" if live.metrics else "",
    ]
    return page(live.path.name, str(live.path), "".join(parts), "/status.json · /metrics for Prometheus")


def _events(title: str, events: Sequence[Event]) -> str:
    rows = ((time.strftime("%m-%d %H:%M:%S", time.localtime(event.time)), event.kind, event.message) for event in reversed(events))
    return f"<h2>{title}</h2>{_table(('time', 'kind', ''), rows)}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    header = f"<thead><tr>{cells}</tr></thead>" if head else ""
    return f'<table class="left">{header}<tbody>{body}</tbody></table>'
