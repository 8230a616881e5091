"""The journal of a conversion: which parts of a folder are written, so that an interrupted conversion resumes where it stopped.

The folder is written under its name with `.partial`, and renamed when it is whole. The first line of its journal describes the conversion,
and each further line is a part that is on the disk. The process that writes the folder holds a lock on it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from mtpctl.checkpoint.listing import flush
from mtpctl.errors import UserError

JOURNAL = "conversion.jsonl"

type PartRecord = list[list[object]] | None
"""The results of the writer of a part, as JSON."""


class Conversion(TypedDict):
    """Identifies a conversion, which only the same one resumes: source files (path, size, change time), config, hash of the layout."""

    to: str
    files: list[tuple[str, int, int]]
    config: dict[str, object]
    layout: str


class Journal:
    """`done`: the parts of `target` that are on the disk, by number. `work`: the folder while it is being written."""

    def __init__(self, target: Path, conversion: Conversion) -> None:
        self.target = target
        self.work = target.with_name(target.name + ".partial")
        self.file = self.work / JOURNAL
        self.done: dict[int, PartRecord] = {}
        self.discarded = False
        """Whether the parts of another, interrupted conversion were deleted."""
        begun = self.work.exists()
        self.work.mkdir(parents=True, exist_ok=True)
        self._lock = self._locked()
        begun = begun or any(self.work.iterdir())
        try:
            if begun and not self.file.is_file():
                raise UserError(f"{self.work}: is in the way, and no conversion of this command's; remove it or name another DST")
            if begun and not self._taken_up(conversion):
                self._clear()
                self.discarded = True
            self.resumed = len(self.done)
            if not self.file.exists():
                self._append(conversion)
        except BaseException:
            self.close()
            raise

    def _locked(self) -> int:
        """Open and lock the folder. Raises UserError where another process writes to it, or has just renamed it."""
        handle = os.open(self.work, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(handle), self.work.stat()):
                raise FileNotFoundError
        except (BlockingIOError, FileNotFoundError) as error:
            os.close(handle)
            raise UserError(f"{self.work}: another conversion writes there; wait for its end, or name another DST") from error
        return handle

    def _clear(self) -> None:
        for path in self.work.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def close(self) -> None:
        """Release the lock on the folder."""
        os.close(self._lock)

    def _taken_up(self, conversion: Conversion) -> bool:
        # What follows the last line break was being written when the conversion stopped.
        whole = [json.loads(line) for line in self.file.read_text().split("\n")[:-1]]
        if not whole or whole[0] != json.loads(json.dumps(conversion)):
            return False
        self.done = {part["part"]: part["noted"] for part in whole[1:]}
        self.file.write_text("".join(json.dumps(line) + "\n" for line in whole))
        return True

    def note(self, part: int, noted: PartRecord = None) -> None:
        """Record that this part is on the disk."""
        self.done[part] = noted
        self._append({"part": part, "noted": noted})

    def _append(self, line: Mapping[str, object]) -> None:
        with self.file.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def publish(self) -> None:
        """Rename the folder, which is whole now, to its target, replacing what is there."""
        old = self.target.with_name(self.target.name + ".replaced")
        if self.target.exists():
            _remove(old)
            self.target.rename(old)
        self.work.rename(self.target)
        (self.target / JOURNAL).unlink()
        _remove(old)
        flush(self.target.parent)


def _remove(path: Path) -> None:
    """Delete a folder, or a link that stands in its place."""
    path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)
