"""The run directory: recipe, software versions, metrics, checkpoints and logs of a run."""

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
"""The recipe of the latest session, with all defaults."""
LOCK = ".lock"
PRIVATE = 0o600
"""File mode of recipes, which may contain names of data, hosts and people."""
BEGUN = ".begun"
"""File in the directory of a run that was started over. It contains the new name of the previous run directory."""
_FOLDERS = ("checkpoints", "logs", "tensorboard")
_ATTEMPTS, _ATTEMPT_S = 3, 0.05
_MIN_FREE = 64 << 20
"""Minimum free space to start, in bytes: less than the smallest checkpoint, more than all text files together."""


class RunDirectory:
    """Paths in a run directory, and the lock against a second run in it.

    `RunDirectory(path)` is for reading. `RunDirectory.create(path, recipe_text)` creates or resumes the directory and locks it until
    `close`; `record` then writes the recipe and versions of this session.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.recipe = self.path / RECIPE
        self.versions = self.path / "versions.json"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.logs = self.path / "logs"
        self.tensorboard = self.path / "tensorboard"
        self.samples = self.path / "samples"
        self.report = self.path / "report.html"
        self.requests = self.path / "requests"
        self.scaled = self.path / "replicas.json"
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, path: str | Path, recipe_text: str) -> RunDirectory:
        """Create the directory with its recipe, or lock an existing one without changing its files.

        A new directory is created under another name and renamed. Raises UserError, without partial files, if the path is read-only, full,
        not a directory, or locked by another run.
        """
        path = Path(path)
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(path.parent).free < _MIN_FREE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if not path.exists():
                _make(path, recipe_text)
            run = cls(path)
            run._acquire()
        return run

    @staticmethod
    def check_writable(path: str | Path) -> None:
        """Raise UserError as `create` would, without leaving files: the test file is anonymous."""
        path = Path(path)
        with _writing(path):
            folder = next(above for above in (path.absolute(), *path.absolute().parents) if above.exists())
            with tempfile.TemporaryFile(dir=folder):
                pass
            if shutil.disk_usage(folder).free < _MIN_FREE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if (path / LOCK).exists():
                with (path / LOCK).open("r+") as lock:
                    _lock(lock, path)

    @property
    def held(self) -> bool:
        """Whether a run has the directory locked, on this host or on one that shares the file system's locks."""
        try:
            with (self.path / LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def _acquire(self) -> None:
        for folder in _FOLDERS:
            (self.path / folder).mkdir(exist_ok=True)
        lock = (self.path / LOCK).open("w")
        _lock(lock, self.path)
        self._lock = lock

    def read_recipe(self) -> dict[str, Any] | None:
        """The recipe of the latest session as a tree; None if there is none. Raises UserError if the file is damaged."""
        if not self.recipe.exists():
            return None
        fix = "restore the file, or remove it and start the run with its recipe"
        try:
            tree = yaml12.parse(read_text(self.recipe), str(self.recipe)).value
        except UserError as error:
            raise UserError(f"{error}; {fix}") from error
        if not isinstance(tree, dict):
            raise UserError(f"{self.recipe}: is empty or not a recipe; {fix}")
        return tree

    def record(self, recipe_text: str) -> list[str]:
        """Write the recipe and the installed versions of this session. An earlier recipe that differs is moved to `logs/`.

        Returns the changed keys as `key: before → after`. Raises UserError if the files cannot be written; the earlier ones are then kept.
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
    """The keys whose values differ between two resolved recipes; empty if one is not valid YAML."""
    try:
        before, after = (flatten(yaml.safe_load(text)) for text in (earlier, later))
    except (yaml.YAMLError, AttributeError):
        return []
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return [f"{'.'.join(key)}: {before.get(key)} → {after.get(key)}" for key in keys]


def _lock(file: IO[str], path: Path) -> None:
    """Lock the directory with its lock file. Raises UserError and closes the file if another run has locked it."""
    for attempt in range(_ATTEMPTS):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # `held` of another process may have the lock briefly.
            time.sleep(_ATTEMPT_S)
            if attempt == _ATTEMPTS - 1:
                file.close()
                raise UserError(f"run_dir: another run is writing {path}; wait for it, or choose another directory") from None
        else:
            return


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Convert an OSError of the block to a UserError with a fix."""
    try:
        yield
    except OSError as error:
        fix = "free space or choose another directory" if error.errno == errno.ENOSPC else "choose a writable directory"
        raise UserError(f"run_dir: cannot write {path} ({error.strerror}); {fix}") from error


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
    """Write a file atomically, by renaming. `mode` is reduced by the umask."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.unlink(missing_ok=True)
        aside.touch(mode)
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
