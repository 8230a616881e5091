"""A teacher: samples get its log-probs, with or without a hint; busy servers are retried, and permanent errors are one line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, cast

import numpy as np
import pytest

from mtpctl.controller.metrics import teacher_metrics
from mtpctl.controller.scoring import HintRenderer, LocalSource, RemoteSource, Teacher
from mtpctl.data.problems import Problem
from mtpctl.errors import RuntimeFailure, UserError
from mtpctl.logprob.protocol import DeadlineExceeded, Scored, ScoreRequest
from mtpctl.logprob.server import LogprobServer
from mtpctl.recipe.data import DataConfig
from mtpctl.recipe.rl import TeacherConfig
from mtpctl.samples import Sample, logprobs_of
from mtpctl.trainer.objective import training_sequence
from tests.fakes.scripted_engine import byte_tokenizer
from tests.fakes.sequences import sequences_of

Answers = Callable[[dict[str, Any], int], tuple[int, dict[str, Any]]]


def sample_of(logprobs: list[float], mask: list[int]) -> Sample:
    created = Sample("p", "g", [5, 6], response_ids=range(len(mask)), loss_mask=mask, behaviour_logprobs=logprobs)
    created.append([], [], 0)
    return created


@contextmanager
def server(answers: Answers) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A log-prob server that answers with `answers`, of the body and the number of the request."""
    received: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _send(self, status: int, body: dict[str, Any]) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_GET(self) -> None:
            self._send(200, {"version": 0})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            received.append(body)
            self._send(*answers(body, len(received) - 1))

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    created = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=created.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{created.server_address[1]}", received
    finally:
        created.shutdown()
        created.server_close()


def score(body: dict[str, Any], number: int) -> tuple[int, dict[str, Any]]:
    if number == 0:
        return 429, {"error": {"message": "the queue is full"}}
    retained = body["mask"]
    return 200, {"data": [{"logprobs": [-0.5 if each else None for each in retained]}]}


PROBLEM = Problem("p", "12+34=", "46", fields={"level": 3})


def taught(url: str, *samples: Sample, **options: Any) -> None:
    async def run() -> None:
        async with RemoteSource(url) as source:
            teacher = Teacher(TeacherConfig(url=url, **options), source, 0.7)
            await asyncio.gather(*(teacher(sample, PROBLEM) for sample in samples))

    asyncio.run(run())


def test_log_probs_reach_the_sample_and_the_advantages() -> None:
    sample = sample_of([-1.0, 0.0, -2.0], [1, 0, 1])
    sample.old_logprobs = sample.behaviour_logprobs
    with server(score) as (url, received):
        taught(f"{url}/v1/", sample)
    assert sample.teacher_logprobs is not None and sample.teacher_logprobs.tolist() == [-0.5, 0.0, -0.5]
    assert received[0] == received[1], "a full queue is asked again"
    assert received[1] == {
        "token_ids": [5, 6, 0, 1, 2],
        "prompt_length": 2,
        "mask": [1, 0, 1],
        "temperature": 0.7,
        "top_logprobs": 0,
        "timeout_s": 300.0,
    }
    assert teacher_metrics([sample]) == {"teacher/kl": pytest.approx((-0.5 - 1.5) / 2)}
    columns = training_sequence(*sequences_of([sample]), 0.25, teacher=TeacherConfig(url=url, coef=2.0)).columns
    assert np.allclose(columns["advantage"], [0.25 + 2 * 0.5, 0.25, 0.25 + 2 * 1.5])
    assert Sample.from_dict(sample.to_dict(packed=True)) == sample and sample.copy() == sample


def test_candidates_of_each_token_reach_the_sample_and_become_columns() -> None:
    def named(body: dict[str, Any], number: int) -> tuple[int, dict[str, Any]]:
        rows = [[{"id": 7, "logprob": -0.5}, {"id": 9, "logprob": -1.5}] if retained else [] for retained in body["mask"]]
        return 200, {"data": [{"logprobs": [-0.5 if retained else None for retained in body["mask"]], "top_logprobs": rows}]}

    sample = sample_of([-1.0, 0.0, -2.0], [1, 0, 1])
    sample.old_logprobs = sample.behaviour_logprobs
    with server(named) as (url, received):
        taught(url, sample, topk=2)
    assert received[0]["top_logprobs"] == 2
    assert sample.candidates is not None and sample.candidates.tolist() == [7, 9, 0, 0, 7, 9]
    columns = training_sequence(*sequences_of([sample]), 0.25, teacher=TeacherConfig(url=url, topk=2)).columns
    assert columns["candidates"].tolist() == [[7, 9], [0, 0], [7, 9]] and columns["candidate_logprobs"][:, 0].tolist() == [-0.5, 0, -0.5]
    assert columns["advantage"].tolist() == [0.25] * 3, "the KL is a separate term"
    assert Sample.from_dict(sample.to_dict(packed=True)) == sample and sample.copy() == sample


def test_samples_without_a_teacher_have_no_kl() -> None:
    assert teacher_metrics([sample_of([-1.0], [1])]) == {}


@pytest.mark.parametrize(
    "answers, message",
    [
        (lambda body, number: (400, {"error": {"message": "token 300 is beyond the vocabulary"}}), "refused p/0: .*beyond the vocabulary"),
        (lambda body, number: (200, {"data": [{"logprobs": [-1.0], "top_logprobs": [[]] * 2}]}), "did not return 3 candidates per token"),
        (lambda body, number: (503, {}), r"returned no log-probs of p/0 within 0\.5 s"),
    ],
)
def test_teacher_without_an_answer_ends_the_run(answers: Answers, message: str) -> None:
    with server(answers) as (url, _), pytest.raises(RuntimeFailure, match=message):
        taught(url, sample_of([-1.0], [1]), timeout_s=0.5, topk=3)


def test_unreachable_server_and_other_web_page_are_rejected() -> None:
    with pytest.raises(UserError, match=r"train\.rl\.teacher\.url: nothing answers at http://127\.0\.0\.1:9"):
        taught("http://127.0.0.1:9")


@pytest.mark.parametrize("same", [True, False])
def test_other_tokenizer_is_rejected(same: bool) -> None:
    def tokens(body: dict[str, Any], number: int) -> tuple[int, dict[str, Any]]:
        ids = list(body["text"].encode())
        return 200, {"data": [{"token_ids": ids[1:] if same else [each + 1 for each in ids[1:]]}]}

    async def run(url: str) -> None:
        async with RemoteSource(url) as source:
            teacher = Teacher(TeacherConfig(url=url), source, 1.0)
            await teacher.check(byte_tokenizer(), [PROBLEM, Problem("q", "x", "y")])

    with server(tokens) as (url, received):
        if same:
            asyncio.run(run(url))
            assert [each["text"] for each in received] == ["12+34="]
        else:
            with pytest.raises(UserError, match=r"train\.rl\.teacher: http://.* has another tokenizer: '12\+34='"):
                asyncio.run(run(url))


class Server:
    """A log-prob server of the run that records its requests."""

    def __init__(self, late: bool = False) -> None:
        self.received: list[ScoreRequest] = []
        self.late = late

    async def score(self, request: ScoreRequest) -> Scored:
        self.received.append(request)
        if self.late:
            raise DeadlineExceeded("too late")
        return Scored(1, logprobs_of([-0.25] * (len(request.token_ids) - request.prompt_length)), logprobs_of([]))


def in_run(server: Server, sample: Sample, hint: str | None, problem: Problem = PROBLEM) -> None:
    tokenizer = byte_tokenizer()
    hinted = None if hint is None else HintRenderer(hint, tokenizer, DataConfig(), ())
    source = LocalSource(cast(LogprobServer, server), "the policy", None)
    asyncio.run(Teacher(TeacherConfig(path="policy"), source, 0.7, hinted)(sample, problem))


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (200, {"version": "0.32.0"}, "is an inference engine such as vLLM, .* prompt log-probs are wrong"),
        (200, {"version": None}, "is an inference engine"),
        (200, {"status": "ok"}, "is not a log-prob server"),
        (200, [], "is not a log-prob server"),
        (404, {"detail": "Not Found"}, r"is not a log-prob server \(status 404\)"),
        (401, {}, "MTPCTL_TEACHER_KEY"),
    ],
)
def test_a_server_that_is_not_a_log_prob_server_is_rejected_at_the_start(status: int, body: Any, reason: str) -> None:
    """vLLM answers `GET /version` too. With drafts its prompt log-probs are off by nats for some requests, with status 200."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    async def enter(url: str) -> None:
        async with RemoteSource(url):
            raise AssertionError("entered")

    created = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=created.serve_forever, args=(0.01,), daemon=True).start()
    try:
        with pytest.raises(UserError, match=reason):
            asyncio.run(enter(f"http://127.0.0.1:{created.server_address[1]}"))
    finally:
        created.shutdown()
        created.server_close()


def test_hint_is_only_in_the_teachers_prompt() -> None:
    server, sample = Server(), sample_of([-1.0, -1.0], [1, 1])
    in_run(server, sample, "{prompt} (level {level}: {answer})")
    (received,) = server.received
    assert bytes(list(received.token_ids[: received.prompt_length])) == b"12+34= (level 3: 46)"
    assert list(received.token_ids[received.prompt_length :]) == [0, 1] and received.temperature == 0.7
    assert sample.prompt_ids.tolist() == [5, 6] and sample.teacher_logprobs is not None


def test_hint_replaces_the_last_user_message() -> None:
    server, sample = Server(), sample_of([-1.0], [1])
    messages = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}, {"role": "user", "content": "12+34="})
    in_run(server, sample, "{prompt} Hint: {solution}", Problem("p", "all of it", "46", messages=messages))
    right = byte_tokenizer().chat([*messages[:2], {"role": "user", "content": "12+34= Hint: 46"}])
    assert list(server.received[0].token_ids[: server.received[0].prompt_length]) == right
    assert messages[2]["content"] == "12+34="


def test_hint_with_an_unknown_column_is_rejected() -> None:
    message = r"train\.rl\.teacher\.hint: '\{nothing\}' cannot be formatted for p .*answer, level, prompt, solution"
    with pytest.raises(UserError, match=message):
        in_run(Server(), sample_of([-1.0], [1]), "{nothing}")


def test_late_answer_of_the_runs_server_is_reported() -> None:
    with pytest.raises(RuntimeFailure, match="the policy returned no log-probs of p/0 within 300 s"):
        in_run(Server(late=True), sample_of([-1.0], [1]), None)
