"""The run directory, which holds everything of a run: its recipe, the versions that it ran on, metrics, checkpoints and logs."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import yaml

from mtpctl.errors import UserError
from mtpctl.recipe import yaml12
from mtpctl.recipe.loading import flatten, read_text
from mtpctl.telemetry.versions import collect_versions

RECIPE = "recipe.resolved.yaml"
"""The recipe of the run's latest start, with every default written out."""
LOCK = ".lock"
PRIVATE = 0o600
"""File mode of recipes, which may name data, hosts and people."""
BEGUN = ".begun"
"""File of a run that was started over: the name to which the earlier run directory was renamed."""
_FOLDERS = ("checkpoints", "buffer", "logs", "tensorboard")
_ATTEMPTS, _ATTEMPT_S = 3, 0.05
_ROOM = 64 << 20
"""Bytes that must be free to begin: less than the smallest checkpoint, more than every text file together."""


class RunDirectory:
    """Paths within a run directory, and the lock that keeps a second run out of it.

    `RunDirectory(path)` is for reading. `RunDirectory.create(path, recipe_text)` makes the directory, or resumes one, and locks it until
    `close`; `record` then writes recipe and versions of this start.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.recipe = self.path / RECIPE
        self.versions = self.path / "versions.json"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.buffer = self.path / "buffer"
        self.logs = self.path / "logs"
        self.tensorboard = self.path / "tensorboard"
        self.samples = self.path / "samples"
        self.report = self.path / "report.html"
        self.requests = self.path / "requests"
        self.scaled = self.path / "replicas.json"
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, path: str | Path, recipe_text: str) -> RunDirectory:
        """Make the directory with its recipe, or lock one that is there and leave its files as they are.

        A new directory is made under another name and renamed. Raises UserError, with nothing half written, where the
        place is read-only, full, no directory, or held by another run.
        """
        path = Path(path)
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(path.parent).free < _ROOM:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if not path.exists():
                _make(path, recipe_text)
            run = cls(path)
            run._take()
        return run

    @staticmethod
    def check_writable(path: str | Path) -> None:
        """Raise UserError as `create` would, but leave nothing behind: the file that is tried has no name."""
        path = Path(path)
        with _writing(path):
            place = next(above for above in (path.absolute(), *path.absolute().parents) if above.exists())
            with tempfile.TemporaryFile(dir=place):
                pass
            if shutil.disk_usage(place).free < _ROOM:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if (path / LOCK).exists():
                with (path / LOCK).open("r+") as lock:
                    _lock(lock, path)

    @property
    def held(self) -> bool:
        """Whether a run is writing the directory now, on this host or on one that shares the file system's locks."""
        try:
            with (self.path / LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def _take(self) -> None:
        for folder in _FOLDERS:
            (self.path / folder).mkdir(exist_ok=True)
        lock = (self.path / LOCK).open("w")
        _lock(lock, self.path)
        self._lock = lock

    def read_recipe(self) -> dict[str, Any] | None:
        """The recipe of the latest start, as a tree. None if the run has none. Raises UserError if the file is damaged."""
        if not self.recipe.exists():
            return None
        way = "restore the file, or remove it and start the run with its recipe"
        try:
            tree = yaml12.parse(read_text(self.recipe), str(self.recipe)).value
        except UserError as error:
            raise UserError(f"{error}; {way}") from error
        if not isinstance(tree, dict):
            raise UserError(f"{self.recipe}: is empty or not a recipe; {way}")
        return tree

    def record(self, recipe_text: str) -> list[str]:
        """Write the recipe and the installed versions of this start. An earlier recipe that differs is moved to `logs/`.

        Returns the keys whose values differ from the earlier recipe, as `key: before → after`.

        Raises UserError if they cannot be written; the earlier ones are left then.
        """
        changes: list[str] = []
        with _writing(self.path):
            if self.recipe.exists() and (earlier := self.recipe.read_text(errors="replace")) != recipe_text:
                changes = _changes(earlier, recipe_text)
                write_whole(self.logs / f"recipe.{len(list(self.logs.glob('recipe.*.yaml'))) + 1}.yaml", earlier, mode=PRIVATE)
            write_whole(self.recipe, recipe_text, mode=PRIVATE)
            write_whole(self.versions, json.dumps(collect_versions(), indent=2) + "\n")
        return changes

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _changes(earlier: str, later: str) -> list[str]:
    """The keys whose values differ between two resolved recipes. None if the earlier one is not valid YAML."""
    try:
        before, after = (flatten(yaml.safe_load(text)) for text in (earlier, later))
    except (yaml.YAMLError, AttributeError):
        return []
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return [f"{'.'.join(key)}: {before.get(key)} → {after.get(key)}" for key in keys]


def _lock(file: IO[str], path: Path) -> None:
    """Lock the directory by its lock file. Raises UserError, and closes the file, where another run has locked it."""
    for attempt in range(_ATTEMPTS):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # `held` of another process has the lock for a moment.
            time.sleep(_ATTEMPT_S)
            if attempt == _ATTEMPTS - 1:
                file.close()
                raise UserError(f"run_dir: another run is writing {path}; wait for it, or name another place") from None
        else:
            return


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a UserError that says how to fix it."""
    try:
        yield
    except OSError as error:
        mend = "free space or name another place" if error.errno == errno.ENOSPC else "name a place that can be written"
        raise UserError(f"run_dir: cannot write {path} ({error.strerror}); {mend}") from error


def _make(path: Path, recipe_text: str) -> None:
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))  # with mode 0700
    try:
        for folder in _FOLDERS:
            (aside / folder).mkdir()
        write_whole(aside / RECIPE, recipe_text, mode=PRIVATE)
        aside.rename(path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def write_whole(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write a file atomically by renaming: a reader sees the new file or the old one. `mode` is reduced by the umask."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.unlink(missing_ok=True)
        aside.touch(mode)
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
