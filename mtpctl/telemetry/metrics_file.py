"""`metrics.jsonl`: one JSON object a line, appended and flushed, so that it can be read while the run goes on and after a crash.

A row is {"session", "time", "phase", "step", metrics…} or {"session", "time", "event", "message"}. `session` counts the starts of the
run. A resumed run appends to the file, and repeats the steps that an earlier session did after the checkpoint.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import time
from collections.abc import Buffer, Mapping
from pathlib import Path
from typing import Any, TextIO

from mtpctl.errors import RuntimeFailure, UserError

# A file to append to on a disk that may be full for a while.

PATIENCE_S = 300.0
"""Seconds for which a disk may be full before a run ends by it."""


class PatientFile(io.BufferedIOBase):
    """Appends to a file. What the disk does not take waits in memory, and is written in order by the next call that finds room.

    `write` raises OSError where the disk has taken nothing for `PATIENCE_S`.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._file = path.open("ab", buffering=0)
        self._waiting = bytearray()
        self._full_since: float | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer) -> int:
        taken = bytes(data)
        self._waiting += taken
        self._write_waiting()
        return len(taken)

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: self._file.write(self._waiting)]
                self._full_since = None
        except OSError:
            now = time.monotonic()
            self._full_since = now if self._full_since is None else self._full_since
            if now - self._full_since >= PATIENCE_S:
                raise

    def close(self) -> None:
        """Try to write what still waits, and drop what the disk does not take."""
        if not self.closed:
            with contextlib.suppress(OSError):
                self._write_waiting()
            self._file.close()
        super().close()


def open_patiently(path: Path) -> TextIO:
    """Open a text file to append to, as `PatientFile` does it."""
    return io.TextIOWrapper(PatientFile(path), encoding="utf-8", write_through=True)


DAMAGED = ".damaged"
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


RawRow = dict[str, Any]
"""A row as JSON has it."""


class MetricsFile:
    """Appends rows. First removes an incomplete last line, which a killed process may have left.

    `damaged`: the numbers of complete lines that are not rows. They are moved to `metrics.jsonl.damaged`, so that a damaged line does not
    prevent a run from resuming.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = _set_damaged_lines_aside(path) if path.exists() else []
        earlier = read_rows(path) if path.exists() else []
        self.session = 1 + max((row["session"] for row in earlier), default=0)
        if path.exists():
            _cut_torn_line(path)
        self._file = open_patiently(path)

    def append(self, row: Mapping[str, object]) -> None:
        """Write one line. Unless the disk is full, it is in the page cache when this returns, and survives this process, though not the
        machine.

        On a disk that is full it waits for room, beside the run. Raises RuntimeFailure where the disk has been full for `PATIENCE_S`; the
        file may end in an incomplete line then.
        """
        safe = {key: plain(value) for key, value in {"session": self.session, **row}.items()}
        try:
            self._file.write(json.dumps(safe, allow_nan=False) + "\n")
        except OSError as error:
            raise RuntimeFailure(f"cannot write {self.path}: {error.strerror}; free space and start the same command again") from error

    def close(self) -> None:
        """Close the file. A torn line that a full disk leaves is cut off by the next session."""
        self._file.close()


def plain(value: object) -> object:
    """The value as JSON takes it: NaN and infinities, which JSON does not have, by name."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _cut_torn_line(path: Path) -> None:
    with path.open("rb+") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole != len(content):
            file.truncate(whole)


def _set_damaged_lines_aside(path: Path) -> list[int]:
    lines = _lines(path)
    damaged = [number for number, line in enumerate(lines[:-1], start=1) if _row_of(line) is None]
    if damaged:
        with path.with_name(f"{path.name}{DAMAGED}").open("ab") as file:
            file.writelines(lines[number - 1] + b"\n" for number in damaged)
        aside = path.with_name(f"{path.name}.partial")
        aside.write_bytes(b"\n".join(line for number, line in enumerate(lines, start=1) if number not in damaged))
        aside.replace(path)
    return damaged


def read_rows(path: Path) -> list[RawRow]:
    """All rows. A last line without a newline was not written completely, and is left out.

    Raises UserError, with the line's number, for any other line that is no row, and for a file that cannot be read.
    """
    rows: list[RawRow] = []
    for number, line in enumerate(_lines(path)[:-1], start=1):
        if (row := _row_of(line)) is None:
            raise UserError(f"{path}:{number}: not a metrics row; remove the line")
        rows.append(
            {key: NOT_FINITE.get(value, value) if isinstance(value, str) and key != "message" else value for key, value in row.items()}
        )
    return rows


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def _row_of(line: bytes) -> RawRow | None:
    """The row of a line; None if the line is not a row."""
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
