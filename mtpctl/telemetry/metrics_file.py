"""`metrics.jsonl`: one JSON object a line, appended and flushed, readable while the run goes on and after it was cut off.

A row is {"session", "time", "phase", "step", metrics…} or {"session", "time", "event", "message"}. `session` counts the
starts of the run: a resumed run appends, and what the earlier session did beyond the checkpoint is told apart by it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from mtpctl.errors import RuntimeFailure, UserError

NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsFile:
    """Appends rows. A line that an earlier process left torn is cut off first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        earlier = read_rows(path) if path.exists() else []
        self.session = 1 + max((row["session"] for row in earlier), default=0)
        if path.exists():
            _cut_torn_line(path)
        self._file = path.open("a", encoding="utf-8")

    def append(self, row: dict[str, Any]) -> None:
        """One line, in the page cache when this returns: it survives this process, though not the machine.

        Raises RuntimeFailure where the disk is full or gone; the file then ends at worst in a torn line.
        """
        safe = {key: _plain(value) for key, value in {"session": self.session, **row}.items()}
        try:
            self._file.write(json.dumps(safe, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise RuntimeFailure(f"cannot write {self.path}: {error.strerror}; free space and start the same command again") from error

    def close(self) -> None:
        self._file.close()


def _plain(value: Any) -> Any:
    """JSON has no NaN: such a number goes in as its name."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _cut_torn_line(path: Path) -> None:
    with path.open("rb+") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole != len(content):
            file.truncate(whole)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Every whole row. A last line without its newline is a write that was cut off, and left out.

    Raises UserError, with the line's number, for a broken line anywhere else, and for what is no file that can be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not _is_row(row):
            raise UserError(f"{path}:{number}: not a metrics row; remove the line")
        rows.append(
            {key: NOT_FINITE.get(value, value) if isinstance(value, str) and key != "message" else value for key, value in row.items()}
        )
    return rows


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("session"), int) or not isinstance(row.get("time"), int | float):
        return False
    if "event" in row:
        return isinstance(row["event"], str) and isinstance(row.get("message"), str)
    return isinstance(row.get("step"), int) and isinstance(row.get("phase"), str)
