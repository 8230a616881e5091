"""How `mtpctl scale` asks a run for another number of rollout replicas: through files in the run directory.

Whoever can write there may ask, from any host that sees the directory.

requests/ID.json      {"replicas": 3}                   written by the command, removed by the run once it has read it
requests/ID.answer    {"told": "…", "refused": false}   written by the run, removed by the command
replicas.json         {"asked": 3}                      written by the run, which begins with this number when it is started again
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
"""Seconds that a run has to answer. It looks for requests every second, but its event loop may be busy."""
LOOK_S = 0.2
"""Seconds between two looks for an answer."""


@dataclass(frozen=True)
class Answer:
    """The run's answer: a line for the user, and whether the request is refused."""

    told: str
    refused: bool = False


@dataclass(frozen=True)
class ScaleRequest:
    """A number of rollout replicas that somebody asks for."""

    file: Path
    replicas: int

    def answer(self, answer: Answer) -> None:
        """Write the answer for the command that waits for it."""
        write_whole(self.file.with_suffix(".answer"), json.dumps(asdict(answer)))


def remember(run: RunDirectory, replicas: int) -> None:
    """Note the number that was asked for last. Called by the run. Raises UserError where it cannot be written."""
    try:
        write_whole(run.scaled, json.dumps({"asked": replicas}) + "\n")
    except OSError as error:
        raise UserError(f"RUN: cannot write {run.scaled} ({error.strerror}); free space and ask again") from error


def remembered(run: RunDirectory) -> int | None:
    """The number that `mtpctl scale` asked for last, over all starts of the run; None where it never did.

    Raises UserError where the file cannot be read.
    """
    try:
        return int(json.loads(run.scaled.read_text(encoding="utf-8"))["asked"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{run.scaled}: is not what mtpctl scale left; remove it, and ask again") from error


def forget_requests(run: RunDirectory) -> None:
    """Remove requests to an earlier start of the run. Called by the run when it starts."""
    for file in _files(run, "*"):
        file.unlink(missing_ok=True)


def take_requests(run: RunDirectory) -> Iterator[ScaleRequest]:
    """The requests that are there, the oldest first. Called by the run; removes each request, and files that cannot be read as one."""
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
    """Ask the run for a number of rollout replicas, and wait for its answer.

    Raises UserError where the run does not go on, or nothing can be written into its directory, and RuntimeFailure where it does not
    answer within `ANSWER_S`.
    """
    if not run.held:
        raise UserError(f"RUN: {run.path} is not running; start it with mtpctl train {run.path}")
    file = run.requests / f"{time.time_ns()}-{uuid.uuid4().hex[:8]}.json"
    answer, end = file.with_suffix(".answer"), time.monotonic() + ANSWER_S
    try:
        run.requests.mkdir(exist_ok=True)
        write_whole(file, json.dumps({"replicas": replicas}))
    except OSError as error:
        raise UserError(f"RUN: cannot write {run.requests} ({error.strerror}); ask as the user who started the run") from error
    try:
        while time.monotonic() < end:
            if answer.exists():
                return Answer(**json.loads(answer.read_text(encoding="utf-8")))
            if not run.held:
                raise RuntimeFailure(f"{run.path}: the run has ended before it answered")
            time.sleep(LOOK_S)
        raise RuntimeFailure(f"{run.path}: no answer within {ANSWER_S:g} s; look into logs/run.log")
    finally:
        file.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)
