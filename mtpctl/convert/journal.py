"""What of a folder is written already, so that an interrupted conversion goes on where it stopped.

The folder grows beside its place, under the name with `.partial`, and is renamed when it is whole. Its journal names the
conversion on the first line, and then each part that is on the disk. Whoever works on it holds a lock on it, which ends with
its process.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

from mtpctl.errors import UserError

JOURNAL = "conversion.jsonl"


class Journal:
    """The parts of `target` that are on the disk: number → what was noted of it. `work` is where the folder grows."""

    def __init__(self, target: Path, conversion: dict[str, Any]) -> None:
        self.target = target
        self.work = target.with_name(target.name + ".partial")
        self.file = self.work / JOURNAL
        self.done: dict[int, Any] = {}
        self.discarded = False
        """Whether another conversion's beginnings were thrown away."""
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
        """The folder, open and locked. Raises UserError where another process works on it, or has just put it in its place."""
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
        """Let others work on the folder."""
        os.close(self._lock)

    def _taken_up(self, conversion: dict[str, Any]) -> bool:
        # What follows the last line break was being written when the conversion stopped.
        whole = [json.loads(line) for line in self.file.read_text().split("\n")[:-1]]
        if not whole or whole[0] != json.loads(json.dumps(conversion)):
            return False
        self.done = {part["part"]: part["noted"] for part in whole[1:]}
        self.file.write_text("".join(json.dumps(line) + "\n" for line in whole))
        return True

    def note(self, part: int, noted: Any = None) -> None:
        """This part is on the disk."""
        self.done[part] = noted
        self._append({"part": part, "noted": noted})

    def _append(self, line: dict[str, Any]) -> None:
        with self.file.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def publish(self) -> None:
        """Everything is there: the folder takes its place, instead of what stood there."""
        old = self.target.with_name(self.target.name + ".replaced")
        if self.target.exists():
            shutil.rmtree(old, ignore_errors=True)
            self.target.rename(old)
        self.work.rename(self.target)
        (self.target / JOURNAL).unlink()
        shutil.rmtree(old, ignore_errors=True)
        _flush(self.target.parent)


def _flush(folder: Path) -> None:
    """A rename is not on the disk before its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
