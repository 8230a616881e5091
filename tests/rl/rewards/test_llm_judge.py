"""The reward `llm_judge` with a fake of OpenAI's API."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from mtpctl.data.problems import Problem
from mtpctl.recipe.reward import RewardConfig
from mtpctl.rl.rewards.function import Outcome
from mtpctl.rl.rewards.pool import Rewarder
from mtpctl.samples import Sample
from tests.fakes.judge import Judge

PROBLEM = Problem("p:1", "What is {response}?", "two")


@pytest.fixture
def judge() -> Iterator[Judge]:
    server = Judge((200, "Well.\nScore: 0.5"))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
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


def test_judge_receives_the_formatted_prompt_and_its_last_score_counts(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    judge.script = [(200, "Points: 9, no. Points: 7")]
    args = {"prompt": 'Q {prompt} A {answer} R {response} {"x": 1}', "pattern": r"Points: (\d+)", "scale": 10, "api_key_env": "JUDGE_KEY"}
    (outcome,) = judged(judge, **args)
    assert (outcome.reward, outcome.error) == (0.7, "")
    ((headers, body),) = judge.requests
    assert headers["Authorization"] == "Bearer s3cret"
    assert body["messages"] == [{"role": "user", "content": 'Q What is {response}? A two R it is {answer} 2 {"x": 1}'}]
    assert (body["model"], body["temperature"]) == ("big", 0.0)


def test_request_to_a_busy_judge_is_retried(judge: Judge) -> None:
    judge.script = [(429, "slow down"), (503, "later"), (200, "Score: 1")]
    (outcome,) = judged(judge)
    assert outcome.reward == 1.0 and len(judge.requests) == 3


def test_rejected_request_reply_without_score_and_missing_key_are_errors(judge: Judge) -> None:
    judge.script = [(404, "no model big")]
    (refused,) = judged(judge)
    assert "404" in refused.error and "no model big" in refused.error and len(judge.requests) == 1
    judge.script = [(200, "I like it")]
    (silent,) = judged(judge)
    assert "has no score" in silent.error and "I like it" in silent.error
    (keyless,) = judged(judge, api_key_env="NO_SUCH_KEY")
    assert keyless.error == "reward.args: api_key_env: NO_SUCH_KEY is not set in the environment; export it"


def test_unreachable_judge_is_an_error_after_the_last_attempt() -> None:
    closed = Judge((200, ""))
    closed.server_close()
    (outcome,) = judged(closed, retries=1)
    assert "did not answer 2 requests" in outcome.error


def test_many_responses_are_judged_concurrently(judge: Judge) -> None:
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
def test_score_is_parsed_and_clamped(judge: Judge, reply: str, reward: float, out_of_range: float) -> None:
    judge.script = [(200, reply)]
    (outcome,) = judged(judge)
    assert (outcome.reward, outcome.parts, outcome.error) == (reward, {"out_of_range": out_of_range}, "")


@pytest.mark.parametrize("reply", ["Score: 1/0", "Score: 1e999", "Score: high"])
def test_score_that_is_not_a_finite_number_is_an_error(judge: Judge, reply: str) -> None:
    judge.script = [(200, reply)]
    (outcome,) = judged(judge)
    assert outcome.reward == 0.0 and outcome.error
