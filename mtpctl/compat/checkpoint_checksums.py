"""Compute checksums of shards while megatron-core writes them (megatron-core 0.19.2).

megatron-core's writer opens each file with the name `open` of its module. The patch replaces it by a file class that also computes the
checksum of the bytes, in the thread that writes them, so that shards are not read back.
"""

from __future__ import annotations

import io
from collections.abc import Buffer, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Protocol

from megatron.core.dist_checkpointing.strategies import filesystem_async

PINNED = "0.19.2"
LARGE = 1 << 20
"""Minimum size of a buffer whose checksum is computed in another thread, in bytes."""


class Running[E](Protocol):
    """A checksum that is being computed; `entry` returns the result."""

    def update(self, data: Buffer) -> None: ...

    @property
    def entry(self) -> E: ...


class _Files[E]:
    """Opens files for writing, and stores their entries by path until `take` returns them."""

    def __init__(self, checksum: type[Running[E]]) -> None:
        self.checksum = checksum
        self.entries: dict[str, E] = {}

    def __call__(self, path: str, mode: str) -> _File[E]:
        assert mode == "wb", f"megatron-core opens {path} to {mode}"
        return _File(path, self)


class _File[E](io.BufferedWriter):
    """A file whose checksum is computed. Large buffers are processed by another thread while they are written, to overlap both."""

    def __init__(self, path: str, files: _Files[E]) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._path, self._files, self._running = path, files, files.checksum()
        self._thread = ThreadPoolExecutor(1, "checksum")

    def write(self, data: Buffer) -> int:
        if memoryview(data).nbytes < LARGE:
            self._running.update(data)
            return super().write(data)
        summed = self._thread.submit(self._running.update, data)
        try:
            return super().write(data)
        finally:
            summed.result()  # The caller may change the buffer afterwards.

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._thread.shutdown()
            self._files.entries[self._path] = self._running.entry


def install[E](checksum: type[Running[E]]) -> None:
    """Have megatron-core's files compute checksums. May be called again. Raises RuntimeError for another release."""
    if (installed := version("megatron-core")) != PINNED:
        raise RuntimeError(f"{__name__} was written for megatron-core {PINNED}, found {installed}: check how it opens the files it writes")
    if not isinstance(vars(filesystem_async).get("open"), _Files):
        vars(filesystem_async)["open"] = _Files(checksum)


def take(paths: Iterable[str]) -> dict[str, object]:
    """Return and remove the entries of these files. Files that were not written are left out."""
    entries = vars(filesystem_async)["open"].entries
    return {path: entry for path in paths if (entry := entries.pop(path, None)) is not None}
