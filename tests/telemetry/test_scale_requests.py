"""Whoever sees a run's directory can ask it for something, and gets its answer, the reason of a refusal, or is told that nobody answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mtpctl.errors import RuntimeFailure, UserError
from mtpctl.telemetry import scale_requests
from mtpctl.telemetry.run_directory import RunDirectory
from mtpctl.telemetry.scale_requests import Answer, ask, forget_requests, take_requests


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run that goes on."""
    return RunDirectory.create(tmp_path / "run", "name: t\n")


def answering(run: RunDirectory, answer: Callable[[int], Answer], count: int) -> threading.Thread:
    """A run that answers so many requests."""

    def work() -> None:
        left, end = count, time.monotonic() + 10
        while left and time.monotonic() < end:
            for request in take_requests(run):
                request.answer(answer(request.replicas))
                left -= 1
            time.sleep(0.01)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_each_of_several_who_ask_at_once_gets_the_answer_to_its_own_request(run: RunDirectory) -> None:
    result: dict[int, Answer] = {}
    asking = [threading.Thread(target=lambda n=n: result.update({n: ask(run, n)})) for n in range(4)]
    answers = answering(run, lambda n: Answer(f"{n} it is", refused=n == 2), len(asking))
    for thread in asking:
        thread.start()
    for thread in (*asking, answers):
        thread.join(15)
    assert result == {n: Answer(f"{n} it is", refused=n == 2) for n in range(4)}
    assert not list(run.requests.iterdir()), "nothing is left"


def test_request_to_stopped_run_is_rejected(run: RunDirectory) -> None:
    run.close()
    with pytest.raises(UserError, match=r"^RUN: .*/run is not running; start it with mtpctl train "):
        ask(run, 2)
    assert not run.requests.exists()


def test_request_without_answer_times_out_and_is_removed(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_requests, "ANSWER_S", 0.1)
    with pytest.raises(RuntimeFailure, match=r"no answer within 0\.1 s; check logs/run\.log"):
        ask(run, 2)
    assert not list(take_requests(run))


def test_run_that_ends_before_answer_is_reported(run: RunDirectory) -> None:
    threading.Timer(0.3, run.close).start()
    with pytest.raises(RuntimeFailure, match="the run ended before it answered"):
        ask(run, 2)


def test_earlier_and_invalid_requests_are_removed(run: RunDirectory) -> None:
    run.requests.mkdir()
    (run.requests / "1.json").write_text('{"replicas": 3}')
    forget_requests(run)
    assert not list(take_requests(run))
    for name, text in (("2", "{"), ("3", "[]"), ("4", '{"replicas": true}'), ("5", '{"replicas": "9"}'), ("6", '{"replicas": 2}')):
        (run.requests / f"{name}.json").write_text(text)
    assert [request.replicas for request in take_requests(run)] == [2]
    assert not list(run.requests.iterdir())
