"""`metrics.jsonl`: one JSON object per line, flushed, so it can be read during the run and after a crash.

A row is {"session", "time", "phase", "step", metrics…} or {"session", "time", "event", "message"}. `session` counts the starts of the
run. A resumed run appends to the file, and repeats the steps that the earlier session ran after the checkpoint. `load_history` returns one
row per step without these repeats.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import time
from collections.abc import Buffer, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from mtpctl.errors import RuntimeFailure, UserError

DISK_FULL_TIMEOUT_S = 300.0
"""Seconds for which the disk may be full before the run fails."""


class RetryingFile(io.BufferedIOBase):
    """Appends to a file. Data that does not fit on a full disk is buffered, and written in order by the next call that succeeds.

    `write` raises OSError if the disk has accepted nothing for `DISK_FULL_TIMEOUT_S`.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._file = path.open("ab", buffering=0)
        self._buffer = bytearray()
        self._full_since: float | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer) -> int:
        chunk = bytes(data)
        self._buffer += chunk
        self._flush_buffer()
        return len(chunk)

    def _flush_buffer(self) -> None:
        try:
            while self._buffer:
                del self._buffer[: self._file.write(self._buffer)]
                self._full_since = None
        except OSError:
            now = time.monotonic()
            self._full_since = now if self._full_since is None else self._full_since
            if now - self._full_since >= DISK_FULL_TIMEOUT_S:
                raise

    def close(self) -> None:
        """Try to write the buffer. Data that does not fit on the disk is dropped."""
        if not self.closed:
            with contextlib.suppress(OSError):
                self._flush_buffer()
            self._file.close()
        super().close()


def open_retrying(path: Path) -> TextIO:
    """Open a text file for appending, as a `RetryingFile`."""
    return io.TextIOWrapper(RetryingFile(path), encoding="utf-8", write_through=True)


DAMAGED_SUFFIX = ".damaged"
"""Suffix of the file with damaged lines."""
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

RawRow = dict[str, Any]
"""A row as parsed from JSON."""


class MetricsFile:
    """Appends rows. First removes an incomplete last line, which a killed process may have left.

    `damaged`: numbers of complete but invalid lines. They are moved to `metrics.jsonl.damaged`, so they do not prevent a resume.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = _move_damaged_lines(path) if path.exists() else []
        earlier_rows = read_rows(path) if path.exists() else []
        self.session = 1 + max((row["session"] for row in earlier_rows), default=0)
        if path.exists():
            _remove_incomplete_line(path)
        self._file = open_retrying(path)

    def append(self, row: Mapping[str, object]) -> None:
        """Write one line to the page cache, where it survives the process, but not a crash of the machine.

        If the disk is full, the line is buffered. Raises RuntimeFailure if the disk has been full for `DISK_FULL_TIMEOUT_S`; the file may
        then end with an incomplete line.
        """
        json_row = {key: json_safe(value) for key, value in {"session": self.session, **row}.items()}
        try:
            self._file.write(json.dumps(json_row, allow_nan=False) + "\n")
        except OSError as error:
            raise RuntimeFailure(f"cannot write {self.path}: {error.strerror}; free space and start the same command again") from error

    def close(self) -> None:
        """Close the file. The next session removes an incomplete line, which a full disk may leave."""
        self._file.close()


def json_safe(value: object) -> object:
    """The value for JSON. NaN and infinities, which JSON lacks, become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _remove_incomplete_line(path: Path) -> None:
    with path.open("rb+") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def _move_damaged_lines(path: Path) -> list[int]:
    """Move complete but invalid lines to another file. Returns their numbers."""
    lines = _lines(path)
    damaged = [number for number, line in enumerate(lines[:-1], start=1) if _parse_row(line) is None]
    if damaged:
        with path.with_name(f"{path.name}{DAMAGED_SUFFIX}").open("ab") as file:
            file.writelines(lines[number - 1] + b"\n" for number in damaged)
        partial = path.with_name(f"{path.name}.partial")
        partial.write_bytes(b"\n".join(line for number, line in enumerate(lines, start=1) if number not in damaged))
        partial.replace(path)
    return damaged


def read_rows(path: Path) -> list[RawRow]:
    """All rows, without an incomplete last line.

    Raises UserError with the line number for any other invalid line, and for a file that cannot be read.
    """
    rows: list[RawRow] = []
    for number, line in enumerate(_lines(path)[:-1], start=1):
        if (row := _parse_row(line)) is None:
            raise UserError(f"{path}:{number}: not a metrics row; remove the line")
        for key, value in row.items():
            if isinstance(value, str) and key != "message":
                row[key] = NOT_FINITE.get(value, value)
        rows.append(row)
    return rows


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def _parse_row(line: bytes) -> RawRow | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if _is_row(row) else None


def _is_row(row: object) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("session"), int) or not isinstance(row.get("time"), int | float):
        return False
    if "event" in row:
        return isinstance(row["event"], str) and isinstance(row.get("message"), str)
    return isinstance(row.get("step"), int) and isinstance(row.get("phase"), str)


ERROR_KINDS = ("error", "alarm", "restart")
"""Kinds of events that are listed as errors."""
_RESERVED = {"session", "time", "phase", "step"}


@dataclass(slots=True)
class Row:
    """All metrics of one step of a phase. `time`: when its last metrics were logged, in seconds since 1970."""

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

    def metric_names(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row.metrics))

    def series(self, name: str, phase: str | None = None) -> list[tuple[int, float]]:
        """(step, value) of one metric, in one phase or over all phases in order."""
        return [(row.step, row.metrics[name]) for row in self.rows if name in row.metrics and phase in (None, row.phase)]

    def last_step(self, phase: str) -> int:
        """Largest step of a phase; 0 if it never ran."""
        return max((row.step for row in self.rows if row.phase == phase), default=0)

    @property
    def phase_lengths(self) -> list[str]:
        """The length of each phase, for a heading: `87 SFT steps`, `40 RL steps`."""
        return [f"{self.last_step(phase)} {phase.upper()} steps" for phase in self.phases]


def load_history(run_dir: Path) -> History:
    """The history of a run directory; empty if it has no metrics."""
    path = run_dir / "metrics.jsonl"
    return build_history(read_rows(path)) if path.exists() else History([], [])


def build_history(raw_rows: Iterable[RawRow]) -> History:
    """Merge the rows of each step. Steps that a later session repeated after a resume are dropped from the earlier session."""
    raw_rows = list(raw_rows)
    events = [Event(row["time"], row["event"], row["message"]) for row in raw_rows if "event" in row]
    first_steps: dict[tuple[str, int], int] = {}
    session_spans: dict[int, tuple[float, float]] = {}
    for row in raw_rows:
        first, last = session_spans.get(row["session"], (row["time"], row["time"]))
        session_spans[row["session"]] = (min(first, row["time"]), max(last, row["time"]))
        if "event" not in row:
            key = (row["phase"], row["session"])
            first_steps[key] = min(first_steps.get(key, row["step"]), row["step"])
    order = {phase: index for index, phase in enumerate(dict.fromkeys(row["phase"] for row in raw_rows if "event" not in row))}
    merged: dict[tuple[str, int], Row] = {}
    for row in raw_rows:
        if "event" in row:
            continue
        phase, step, session = row["phase"], row["step"], row["session"]
        if any(
            (order[phase], step) > (order[later_phase], first_step)
            for (later_phase, later_session), first_step in first_steps.items()
            if later_session > session
        ):
            continue
        merged_row = merged.setdefault((phase, step), Row(phase, step, row["time"], session))
        merged_row.time, merged_row.session = row["time"], session
        merged_row.metrics.update({name: value for name, value in row.items() if name not in _RESERVED})
    rows = sorted(merged.values(), key=lambda row: (order[row.phase], row.step))
    return History(rows, events, sum(last - first for first, last in session_spans.values()))
