"""`llm_judge` on an HTTP server that answers as OpenAI's API does."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from mtpctl.data.problems import Problem
from mtpctl.recipe.reward import RewardConfig
from mtpctl.rl.rewards.function import Outcome
from mtpctl.rl.rewards.pool import Rewarder
from mtpctl.samples import Sample

PROBLEM = Problem("p:1", "What is {response}?", "two")


class Judge(ThreadingHTTPServer):
    """Answers with the next of `script` (status, text), and with the last one from then on. `asked` holds headers and bodies."""

    request_queue_size = 256  # of five the kernel would reset some when a whole evaluation asks at once

    def __init__(self, *script: tuple[int, str]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.asked = list(script), list[tuple[dict[str, str], dict[str, Any]]]()


class Handler(BaseHTTPRequestHandler):
    server: Judge

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions"
        self.server.asked.append((dict(self.headers), body))
        status, text = self.server.script.pop(0) if len(self.server.script) > 1 else self.server.script[0]
        answer = json.dumps({"choices": [{"message": {"content": text}}]} if status == 200 else {"error": text}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def judge() -> Iterator[Judge]:
    server = Judge((200, "Well.\nScore: 0.5"))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def judged(judge: Judge, count: int = 1, **args: object) -> list[Outcome]:
    config = RewardConfig(function="llm_judge", args={"url": f"http://127.0.0.1:{judge.server_port}/v1/", "model": "big", **args})

    async def run() -> list[Outcome]:
        async with Rewarder(config) as reward:
            return await asyncio.gather(*(reward("it is {answer} 2", PROBLEM, Sample("p:1", "0", [1])) for _ in range(count)))

    return asyncio.run(asyncio.wait_for(run(), 60))


def test_the_judge_sees_the_prompt_filled_in_once_and_its_last_score_counts(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    judge.script = [(200, "Points: 9, no. Points: 7")]
    args = {"prompt": 'Q {prompt} A {answer} R {response} {"x": 1}', "pattern": r"Points: (\d+)", "scale": 10, "api_key_env": "JUDGE_KEY"}
    (outcome,) = judged(judge, **args)
    assert (outcome.reward, outcome.error) == (0.7, "")
    ((headers, body),) = judge.asked
    assert headers["Authorization"] == "Bearer s3cret"
    assert body["messages"] == [{"role": "user", "content": 'Q What is {response}? A two R it is {answer} 2 {"x": 1}'}]
    assert (body["model"], body["temperature"]) == ("big", 0.0)


def test_a_busy_judge_is_asked_again(judge: Judge) -> None:
    judge.script = [(429, "slow down"), (503, "later"), (200, "Score: 1")]
    (outcome,) = judged(judge)
    assert outcome.reward == 1.0 and len(judge.asked) == 3


def test_what_it_refuses_what_has_no_score_and_a_key_that_is_not_set_are_errors(judge: Judge) -> None:
    judge.script = [(404, "no model big")]
    (refused,) = judged(judge)
    assert "404" in refused.error and "no model big" in refused.error and len(judge.asked) == 1
    judge.script = [(200, "I like it")]
    (silent,) = judged(judge)
    assert "has no score" in silent.error and "I like it" in silent.error
    (keyless,) = judged(judge, api_key_env="NO_SUCH_KEY")
    assert keyless.error == "reward.args: api_key_env: NO_SUCH_KEY is not set in the environment; export it"


def test_nobody_there_is_an_error_after_the_last_attempt() -> None:
    gone = Judge((200, ""))
    gone.server_close()
    (outcome,) = judged(gone, retries=1)
    assert "gave no answer 2 times" in outcome.error


def test_many_responses_are_judged_at_once(judge: Judge) -> None:
    assert [outcome.reward for outcome in judged(judge, 60)] == [0.5] * 60


@pytest.mark.parametrize(
    ("reply", "reward", "out_of_range"),
    [
        ("Score: 1000", 1.0, 1.0),
        ("Score: -3", 0.0, 1.0),
        ("Score: 3/10", 0.3, 0.0),
        ("Score: 30%", 0.3, 0.0),
        ("Score: 7/5", 1.0, 1.0),
        ("Score: 1.0", 1.0, 0.0),
        ("Score: 0", 0.0, 0.0),
        ("Score: 1e3", 1.0, 1.0),
        ("Score: **.5**", 0.5, 0.0),
    ],
)
def test_score_is_parsed_and_bounded_and_counted_if_out_of_range(judge: Judge, reply: str, reward: float, out_of_range: float) -> None:
    judge.script = [(200, reply)]
    (outcome,) = judged(judge)
    assert (outcome.reward, outcome.parts, outcome.error) == (reward, {"out_of_range": out_of_range}, "")


@pytest.mark.parametrize("reply", ["Score: 1/0", "Score: 1e999", "Score: high"])
def test_score_that_is_no_finite_number_is_an_error(judge: Judge, reply: str) -> None:
    judge.script = [(200, reply)]
    (outcome,) = judged(judge)
    assert outcome.reward == 0.0 and outcome.error
