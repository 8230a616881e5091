"""The run directory: recipe, software versions, metrics, checkpoints and logs of a run, and the requests of `mtpctl scale`.

`mtpctl scale` requests another number of rollout replicas by files in the run directory. Any user who can write to the directory may send a
request, from any host that mounts it.

requests/ID.json      {"replicas": 3}                     written by the command, removed by the run after reading it
requests/ID.answer    {"message": "…", "refused": false}  written by the run, removed by the command
replicas.json         {"requested": 3}                    written by the run, used as the requested number at its next start
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import yaml

from mtpctl.errors import RuntimeFailure, UserError
from mtpctl.recipe import yaml12
from mtpctl.recipe.loading import flatten, read_text
from mtpctl.telemetry.versions import collect_versions

RECIPE = "recipe.resolved.yaml"
"""The recipe of the latest session, with all defaults."""
LOCK = ".lock"
PRIVATE_MODE = 0o600
"""File mode of recipes, which may contain names of data, hosts and people."""
START_OVER_FILE = ".begun"
"""File in the new directory of a run that was started over. It contains the name that the old directory was renamed to."""
_EARLIER_RECIPE = re.compile(r"recipe\.(\d+)\.yaml")
_FOLDERS = ("checkpoints", "logs", "tensorboard")
_LOCK_ATTEMPTS, _LOCK_RETRY_S = 3, 0.05
_MIN_FREE_BYTES = 64 << 20
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
        self.requested_replicas = self.path / "replicas.json"
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, path: str | Path, recipe_text: str) -> RunDirectory:
        """Create the directory with its recipe if it does not exist, and lock it. Files of an existing directory are not changed.

        Raises UserError, without partial files, if the path is read-only, full, not a directory, or locked by another run.
        """
        path = Path(path)
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(path.parent).free < _MIN_FREE_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if not path.exists():
                _create_directory(path, recipe_text)
            run = cls(path)
            run._acquire()
        return run

    @staticmethod
    def check_writable(path: str | Path) -> None:
        """Raise UserError as `create` would, without leaving files: the test file is anonymous."""
        path = Path(path)
        with _writing(path):
            folder = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
            with tempfile.TemporaryFile(dir=folder):
                pass
            if shutil.disk_usage(folder).free < _MIN_FREE_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if (path / LOCK).exists():
                with (path / LOCK).open("r+") as lock:
                    _lock(lock, path)

    @property
    def is_locked(self) -> bool:
        """Whether a run has locked the directory, on this host or on one that shares the file system's locks."""
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
        """Write the recipe and the installed versions of this session, and remove requests of `mtpctl scale` to earlier sessions.

        An earlier recipe that differs is moved to `logs/`.

        Returns the changed keys as `key: before → after`. Raises UserError if a file cannot be written. Each file is then either
        replaced or unchanged.
        """
        changes: list[str] = []
        with _writing(self.path):
            if self.recipe.exists() and (earlier := self.recipe.read_text(errors="replace")) != recipe_text:
                changes = _changes(earlier, recipe_text)
                numbers = [int(match[1]) for file in self.logs.iterdir() if (match := _EARLIER_RECIPE.fullmatch(file.name))]
                write_atomically(self.logs / f"recipe.{max(numbers, default=0) + 1}.yaml", earlier, mode=PRIVATE_MODE)
            write_atomically(self.recipe, recipe_text, mode=PRIVATE_MODE)
            write_atomically(self.versions, json.dumps(collect_versions(), indent=2) + "\n")
            # The run owns the folder, so that it can remove the requests of other users, such as root.
            self.requests.mkdir(exist_ok=True)
            for file in _request_files(self, "*"):
                file.unlink(missing_ok=True)
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
    for attempt in range(_LOCK_ATTEMPTS):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # `is_locked` of another process may hold the lock briefly.
            time.sleep(_LOCK_RETRY_S)
            if attempt == _LOCK_ATTEMPTS - 1:
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


def _create_directory(path: Path, recipe_text: str) -> None:
    """Create the directory under another name, and rename it when it is complete."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))  # with mode 0700
    try:
        for folder in _FOLDERS:
            (temporary / folder).mkdir()
        write_atomically(temporary / RECIPE, recipe_text, mode=PRIVATE_MODE)
        try:
            temporary.rename(path)
        except OSError:
            if not path.exists():
                raise
            shutil.rmtree(temporary)  # another process has created the directory
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_atomically(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write a file atomically, by renaming. `mode` is reduced by the umask."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        temporary.touch(mode)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


ANSWER_S = 60.0
"""Timeout for the run's answer in seconds. The run polls for requests every second, but its event loop may be busy."""
POLL_S = 0.2
"""Seconds between two polls for the answer."""


@dataclass(frozen=True)
class Answer:
    """The run's answer: a line for the user, and whether the request is rejected."""

    message: str
    refused: bool = False


@dataclass(frozen=True)
class ScaleRequest:
    """A request for a number of rollout replicas. `file`: its file, which has been removed."""

    file: Path
    replicas: int

    def answer(self, answer: Answer) -> None:
        """Write the answer for the waiting command."""
        write_atomically(self.file.with_suffix(".answer"), json.dumps(asdict(answer)))


def store_requested_replicas(run: RunDirectory, replicas: int) -> None:
    """Store the last requested number. Called by the run. Raises UserError if it cannot be written."""
    try:
        write_atomically(run.requested_replicas, json.dumps({"requested": replicas}) + "\n")
    except OSError as error:
        raise UserError(f"RUN: cannot write {run.requested_replicas} ({error.strerror}); free space and retry") from error


def last_requested_replicas(run: RunDirectory) -> int | None:
    """The last number requested by `mtpctl scale`, over all sessions; None if there was no request.

    Raises UserError if the file cannot be read.
    """
    try:
        return int(json.loads(run.requested_replicas.read_text(encoding="utf-8"))["requested"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{run.requested_replicas}: is not a valid file of mtpctl scale; remove it, and repeat the command") from error


def pop_requests(run: RunDirectory) -> Iterator[ScaleRequest]:
    """The pending requests, oldest first. Called by the run; removes each request, and invalid files."""
    for file in _request_files(run, "*.json"):
        try:
            replicas = json.loads(file.read_text(encoding="utf-8"))["replicas"]
        except (OSError, ValueError, KeyError, TypeError):
            replicas = None
        file.unlink(missing_ok=True)
        if type(replicas) is int:
            yield ScaleRequest(file, replicas)


def _request_files(run: RunDirectory, pattern: str) -> list[Path]:
    return sorted(run.requests.glob(pattern), key=lambda file: file.name)


def request_replicas(run: RunDirectory, replicas: int) -> Answer:
    """Request a number of rollout replicas from the run, and wait for its answer.

    Raises UserError if the run is not running or its directory is not writable, RuntimeFailure if the run ends before it answers or does
    not answer within `ANSWER_S`.
    """
    if not run.is_locked:
        raise UserError(f"RUN: {run.path} is not running; start it with mtpctl train {run.path}")
    file = run.requests / f"{time.time_ns()}-{uuid.uuid4().hex[:8]}.json"
    answer, deadline = file.with_suffix(".answer"), time.monotonic() + ANSWER_S
    try:
        run.requests.mkdir(exist_ok=True)
        write_atomically(file, json.dumps({"replicas": replicas}))
    except OSError as error:
        raise UserError(f"RUN: cannot write {run.requests} ({error.strerror}); run the command as the user who started the run") from error
    try:
        while time.monotonic() < deadline:
            if answer.exists():
                return Answer(**json.loads(answer.read_text(encoding="utf-8")))
            if not run.is_locked:
                raise RuntimeFailure(f"{run.path}: the run ended before it answered")
            time.sleep(POLL_S)
        raise RuntimeFailure(f"{run.path}: no answer within {ANSWER_S:g} s; check logs/run.log")
    finally:
        file.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)
