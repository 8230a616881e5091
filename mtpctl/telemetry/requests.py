"""Requests to a run that goes on, by files in its run directory: whoever can write there may ask, from any host that sees it.

requests/ID.json      {"replicas": 3}               written by who asks, removed by the run once it has read it
requests/ID.answer    {"told": "…", "refused": false}   written by the run, removed by who asked
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
"""Seconds that a run has to answer: it looks every second, unless its loop is busy."""
LOOK_S = 0.2
"""Seconds between two looks for an answer."""


@dataclass(frozen=True)
class Answer:
    """What the run says to a request, in one line, and whether it refuses it."""

    told: str
    refused: bool = False


@dataclass(frozen=True)
class Request:
    """A number of rollout replicas that somebody asks for."""

    file: Path
    replicas: int

    def answer(self, answer: Answer) -> None:
        """Tell it to who has asked."""
        write_whole(self.file.with_suffix(".answer"), json.dumps(asdict(answer)))


def forget_requests(run: RunDirectory) -> None:
    """Remove what was asked of an earlier start of the run. Called by the run when it starts."""
    for file in _files(run, "*"):
        file.unlink(missing_ok=True)


def take_requests(run: RunDirectory) -> Iterator[Request]:
    """The requests that are there, the oldest first. Called by the run; each is given once, and files that are none are removed."""
    for file in _files(run, "*.json"):
        try:
            replicas = json.loads(file.read_text(encoding="utf-8"))["replicas"]
        except (OSError, ValueError, KeyError, TypeError):
            replicas = None
        file.unlink(missing_ok=True)
        if type(replicas) is int:
            yield Request(file, replicas)


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
