"""Requests of `mtpctl scale` for another number of rollout replicas, as files in the run directory.

Any user who can write to the directory may send one, from any host that mounts it.

requests/ID.json      {"replicas": 3}                   written by the command, removed by the run after reading it
requests/ID.answer    {"message": "…", "refused": false}   written by the run, removed by the command
replicas.json         {"asked": 3}                      written by the run, used as the requested number at its next start
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from mtpctl.errors import RuntimeFailure, UserError
from mtpctl.telemetry.run_directory import RunDirectory, write_whole

ANSWER_S = 60.0
"""Timeout for the run's answer in seconds. It polls for requests every second, but its event loop may be busy."""
POLL_S = 0.2
"""Seconds between two polls for the answer."""


@dataclass(frozen=True)
class Answer:
    """The run's answer: a line for the user, and whether the request is rejected."""

    message: str
    refused: bool = False


@dataclass(frozen=True)
class ScaleRequest:
    """A request for a number of rollout replicas."""

    file: Path
    replicas: int

    def answer(self, answer: Answer) -> None:
        """Write the answer for the waiting command."""
        write_whole(self.file.with_suffix(".answer"), json.dumps(asdict(answer)))


def remember(run: RunDirectory, replicas: int) -> None:
    """Store the last requested number. Called by the run. Raises UserError if it cannot be written."""
    try:
        write_whole(run.scaled, json.dumps({"asked": replicas}) + "\n")
    except OSError as error:
        raise UserError(f"RUN: cannot write {run.scaled} ({error.strerror}); free space and retry") from error


def remembered(run: RunDirectory) -> int | None:
    """The last number requested by `mtpctl scale`, over all sessions; None if there was no request.

    Raises UserError if the file cannot be read.
    """
    try:
        return int(json.loads(run.scaled.read_text(encoding="utf-8"))["asked"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{run.scaled}: is not a valid file of mtpctl scale; remove it, and repeat the command") from error


def forget_requests(run: RunDirectory) -> None:
    """Remove requests to earlier sessions. Called by the run when it starts."""
    for file in _files(run, "*"):
        file.unlink(missing_ok=True)


def take_requests(run: RunDirectory) -> Iterator[ScaleRequest]:
    """The pending requests, oldest first. Called by the run; removes each request, and invalid files."""
    for file in _files(run, "*.json"):
        try:
            replicas = json.loads(file.read_text(encoding="utf-8"))["replicas"]
        except (OSError, ValueError, KeyError, TypeError):
            replicas = None
        file.unlink(missing_ok=True)
        if type(replicas) is int:
            yield ScaleRequest(file, replicas)


def _files(run: RunDirectory, pattern: str) -> list[Path]:
    return sorted(run.requests.glob(pattern), key=lambda file: file.name)


def ask(run: RunDirectory, replicas: int) -> Answer:
    """Request a number of rollout replicas from the run, and wait for its answer.

    Raises UserError if the run is not running or its directory is not writable, RuntimeFailure if it does not answer within `ANSWER_S`.
    """
    if not run.held:
        raise UserError(f"RUN: {run.path} is not running; start it with mtpctl train {run.path}")
    file = run.requests / f"{time.time_ns()}-{uuid.uuid4().hex[:8]}.json"
    answer, end = file.with_suffix(".answer"), time.monotonic() + ANSWER_S
    try:
        run.requests.mkdir(exist_ok=True)
        write_whole(file, json.dumps({"replicas": replicas}))
    except OSError as error:
        raise UserError(f"RUN: cannot write {run.requests} ({error.strerror}); run the command as the user who started the run") from error
    try:
        while time.monotonic() < end:
            if answer.exists():
                return Answer(**json.loads(answer.read_text(encoding="utf-8")))
            if not run.held:
                raise RuntimeFailure(f"{run.path}: the run ended before it answered")
            time.sleep(POLL_S)
        raise RuntimeFailure(f"{run.path}: no answer within {ANSWER_S:g} s; check logs/run.log")
    finally:
        file.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)
