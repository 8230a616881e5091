"""A run's metrics as they are to be read: resumed sessions stitched together, rows of one step merged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtpctl.telemetry.metrics_file import read_rows

_RESERVED = {"session", "time", "phase", "step"}


@dataclass(slots=True)
class Row:
    """All that was logged for one step of one phase; `time` is that of the last of it, in seconds since 1970."""

    phase: str
    step: int
    time: float
    session: int
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened: `kind` in a word, `message` in a line."""

    time: float
    kind: str
    message: str


@dataclass(slots=True)
class History:
    """Rows in the order of phases and steps, and events in the order of time."""

    rows: list[Row]
    events: list[Event]
    active_s: float = 0.0

    @property
    def phases(self) -> list[str]:
        """Phases in the order in which they ran."""
        return list(dict.fromkeys(row.phase for row in self.rows))

    def names(self) -> list[str]:
        """Every metric, in order of first appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row.metrics))

    def series(self, name: str, phase: str | None = None) -> list[tuple[int, float]]:
        """(step, value) of one metric, in one phase or in the order of all."""
        return [(row.step, row.metrics[name]) for row in self.rows if name in row.metrics and phase in (None, row.phase)]

    def last_step(self, phase: str) -> int:
        """Largest step of a phase; 0 where it never ran."""
        return max((row.step for row in self.rows if row.phase == phase), default=0)


def load_history(run_dir: Path) -> History:
    """Read a run directory's metrics. A directory without any gives an empty history."""
    path = run_dir / "metrics.jsonl"
    return build_history(read_rows(path)) if path.exists() else History([], [])


def build_history(raw: Iterable[dict[str, Any]]) -> History:
    """What a later session went back behind, in its phase or to an earlier one, is dropped: it was done again, or differently."""
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
    place = {phase: index for index, phase in enumerate(dict.fromkeys(row["phase"] for row in raw if "event" not in row))}
    merged: dict[tuple[str, int], Row] = {}
    for row in raw:
        if "event" in row:
            continue
        phase, step, session = row["phase"], row["step"], row["session"]
        if any((place[phase], step) > (place[other], begin) for (other, later), begin in begins.items() if later > session):
            continue
        kept = merged.setdefault((phase, step), Row(phase, step, row["time"], session))
        kept.time, kept.session = row["time"], session
        kept.metrics.update({name: value for name, value in row.items() if name not in _RESERVED})
    rows = sorted(merged.values(), key=lambda row: (place[row.phase], row.step))
    return History(rows, events, sum(last - first for first, last in spans.values()))
