"""A file to append to on a disk that may be full for a while."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Buffer
from pathlib import Path
from typing import TextIO

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
