"""The metrics of a run over all sessions, without repeated steps, and with one row per step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from mtpctl.telemetry.metrics_file import RawRow, read_rows

ERROR_KINDS = ("error", "alarm", "restart")
"""Kinds of events that are listed as errors."""
_RESERVED = {"session", "time", "phase", "step"}


@dataclass(slots=True)
class Row:
    """All metrics of one step of a phase; `time` is that of the last one, in seconds since 1970."""

    phase: str
    step: int
    time: float
    session: int
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    """An event such as a checkpoint or a restart: `kind` is one word, `message` one line."""

    time: float
    kind: str
    message: str


@dataclass(slots=True)
class History:
    """Rows in order of phases and steps, and events in order of time. `active_s`: total duration of the sessions in seconds."""

    rows: list[Row]
    events: list[Event]
    active_s: float = 0.0

    @property
    def phases(self) -> list[str]:
        return list(dict.fromkeys(row.phase for row in self.rows))

    def names(self) -> list[str]:
        """Every metric, in order of first appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row.metrics))

    def series(self, name: str, phase: str | None = None) -> list[tuple[int, float]]:
        """(step, value) of one metric, in one phase or over all phases in order."""
        return [(row.step, row.metrics[name]) for row in self.rows if name in row.metrics and phase in (None, row.phase)]

    def last_step(self, phase: str) -> int:
        """Largest step of a phase; 0 if it never ran."""
        return max((row.step for row in self.rows if row.phase == phase), default=0)

    @property
    def lengths(self) -> list[str]:
        """The length of each phase, for a heading: `87 SFT steps`, `40 RL steps`."""
        return [f"{self.last_step(phase)} {phase.upper()} steps" for phase in self.phases]


def load_history(run_dir: Path) -> History:
    """The history of a run directory; empty if it has no metrics."""
    path = run_dir / "metrics.jsonl"
    return build_history(read_rows(path)) if path.exists() else History([], [])


def build_history(raw: Iterable[RawRow]) -> History:
    """Merge the rows of each step. Steps that a later session repeated after a resume are dropped from the earlier session."""
    raw = list(raw)
    events = [Event(row["time"], row["event"], row["message"]) for row in raw if "event" in row]
    begins: dict[tuple[str, int], int] = {}
    spans: dict[int, tuple[float, float]] = {}
    for row in raw:
        first, last = spans.get(row["session"], (row["time"], row["time"]))
        spans[row["session"]] = (min(first, row["time"]), max(last, row["time"]))
        if "event" not in row:
            key = (row["phase"], row["session"])
            begins[key] = min(begins.get(key, row["step"]), row["step"])
    order = {phase: index for index, phase in enumerate(dict.fromkeys(row["phase"] for row in raw if "event" not in row))}
    merged: dict[tuple[str, int], Row] = {}
    for row in raw:
        if "event" in row:
            continue
        phase, step, session = row["phase"], row["step"], row["session"]
        if any((order[phase], step) > (order[other], begin) for (other, later), begin in begins.items() if later > session):
            continue
        current = merged.setdefault((phase, step), Row(phase, step, row["time"], session))
        current.time, current.session = row["time"], session
        current.metrics.update({name: value for name, value in row.items() if name not in _RESERVED})
    rows = sorted(merged.values(), key=lambda row: (order[row.phase], row.step))
    return History(rows, events, sum(last - first for first, last in spans.values()))
