"""User-defined environments: accepted classes, errors that name the line and end one response only, and closing."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mtpctl.data.tokenizers import Tokenizer, load_tokenizer, make_byte_tokenizer
from mtpctl.environments import environment
from mtpctl.environments.environment import EnvironmentClass, Failures, load_environment_class
from mtpctl.environments.trial import try_environment
from mtpctl.environments.turns import ChatReplies, TurnSessions
from mtpctl.errors import UserError
from mtpctl.recipe.rollout import VllmConfig, check_environment
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.rollout.protocol import DEADLINE, ENVIRONMENT_ERROR
from mtpctl.samples import EnvironmentUse, GenerationRequest, Sample, Unwanted
from tests.fakes import user_environments
from tests.fakes.replica import FakeReplica
from tests.fakes.user_environments import CLOSED

FILE = Path(user_environments.__file__)
CALL = "go </call>"


def found(name: str, **args: object) -> EnvironmentClass:
    created = load_environment_class(VllmConfig(environment=f"tests.fakes.user_environments:{name}", environment_args=args))
    assert created is not None
    return created


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bytes")
    make_byte_tokenizer(folder, chat=False)
    return load_tokenizer(folder)


class Caller(FakeReplica):
    """Writes a call in every turn, and ends its third one with the end token."""

    async def generate(self, request: GenerationRequest) -> Sample:
        sample = request.sample
        await asyncio.sleep(0.001)
        ids = [*CALL.encode()]
        sample.append(ids, [-1.0] * len(ids), 0)
        sample.finish_reason = "stop"
        return sample


async def answers(tokenizer: Tokenizer, name: str, problems: list[Any], *, seconds: float = 5.0, **options: Any) -> list[Sample]:
    async def start(index: int) -> Any:
        return Caller()

    pool = await ReplicaPool.start(
        start, 1, max_in_flight=64, turn_runner=TurnSessions(found(name, **options), tokenizer, 3, ChatReplies(tokenizer))
    )

    async def requests() -> AsyncIterator[GenerationRequest]:
        for number, problem in enumerate(problems):
            yield GenerationRequest(Sample(f"p{number}", "g", [1]), 500, deadline_s=seconds, problem=problem)

    try:
        return [sample async for sample in pool.generate(requests())]
    finally:
        await pool.close()


def test_each_response_has_its_own_instance_which_is_closed(tokenizer: Tokenizer) -> None:
    CLOSED.clear()
    samples = asyncio.run(answers(tokenizer, "Echo", [*"abcdef"], times=2))
    assert {tokenizer.decode(sample.response_ids) for sample in samples} == {f"{CALL}[{CALL}][{CALL}]" * 2 + CALL}
    assert sorted(map(str, CLOSED)) == [*"abcdef"]
    assert all(sample.environment is not None and sample.environment.turns == 2 for sample in samples)


def test_plain_methods_run_in_a_dedicated_thread(tokenizer: Tokenizer) -> None:
    (sample,) = asyncio.run(answers(tokenizer, "Plain", [None]))
    assert (sample.environment_reward, sample.finish_reason) == (0.25, "stop")


def test_an_environment_may_give_the_reward(tokenizer: Tokenizer) -> None:
    (sample,) = asyncio.run(answers(tokenizer, "Rewards", [None]))
    assert sample.environment_reward == 2.0, "two replies, and the third turn was the last one allowed"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raises", r"user_environments\.py:\d+: KeyError: 'no such\\ntool'"),
        ("Exits", r"user_environments\.py:\d+: SystemExit: 3"),
        ("CancelsItself", r".*CancelledError"),
        ("TimesOut", r"user_environments\.py:\d+: TimeoutError: the search engine"),
        ("Number", r"user_environments\.py:\d+: Number\.reply returned int: 7; return text, chat messages or None"),
        ("Bytes", r"user_environments\.py:\d+: Bytes\.reply returned bytes: .*; return text, chat messages or None"),
        ("Half", r"user_environments\.py:\d+: Half\.reply returned text that is not UTF-8 \(surrogates not allowed\); .*"),
        ("Long", r"user_environments\.py:\d+: Long\.reply returned 1,000,001 characters; return at most 1,000,000"),
        ("NoMessage", r"user_environments\.py:\d+: NoMessage\.reply returned a list of \{'role': 'user'\}; a message has .*"),
        ("Messages", r"data\.chat_template: the tokenizer .* has no chat template; set it to false .*"),
    ],
)
def test_failed_reply_ends_its_response_and_is_counted_and_reported(tokenizer: Tokenizer, name: str, message: str) -> None:
    CLOSED.clear()
    samples = asyncio.run(answers(tokenizer, name, [1, 2]))
    for sample in samples:
        assert sample.finish_reason == ENVIRONMENT_ERROR
        assert tokenizer.decode(sample.response_ids) == CALL
        assert sample.environment is not None and (sample.environment.errors, sample.environment.turns) == (1, 0)
        assert re.fullmatch(message, sample.environment.failure), sample.environment.failure
    assert sorted(map(str, CLOSED)) == ["1", "2"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("FailsAtBirth", r"user_environments\.py:\d+: ValueError: no board"),
        ("NoStop", r"user_environments\.py:\d+: NoStop\.stop is missing; .*"),
        ("StopOfText", r"user_environments\.py:\d+: StopOfText\.stop must be a list of texts, got '</call>'"),
    ],
)
def test_environment_that_fails_to_start_ends_its_response(tokenizer: Tokenizer, name: str, message: str) -> None:
    (sample,) = asyncio.run(answers(tokenizer, name, [None]))
    assert (sample.finish_reason, len(sample.response_ids)) == (ENVIRONMENT_ERROR, 0)
    assert sample.environment is not None and re.fullmatch(message, sample.environment.failure)


def test_non_numeric_reward_is_counted_and_the_response_is_kept(tokenizer: Tokenizer) -> None:
    (sample,) = asyncio.run(answers(tokenizer, "NaN", [None]))
    assert (sample.finish_reason, sample.environment_reward) == ("stop", None)
    assert sample.environment is not None and sample.environment.errors == 1
    assert "NaN.reward returned nan; return a finite number, or None" in sample.environment.failure


def test_hanging_method_ends_at_the_deadline_and_is_closed(tokenizer: Tokenizer) -> None:
    CLOSED.clear()
    began = time.monotonic()
    samples = asyncio.run(answers(tokenizer, "Hangs", [*range(8)], seconds=0.3))
    assert time.monotonic() - began < 3
    assert sorted(map(int, map(str, CLOSED))) == [*range(8)]
    for sample in samples:
        assert (sample.finish_reason, tokenizer.decode(sample.response_ids)) == (DEADLINE, CALL)
        assert sample.environment is not None and (sample.environment.timeouts, sample.environment.errors) == (1, 0)


def test_a_coroutine_that_blocks_stops_neither_the_pool_nor_the_environments_after_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Environments that share its event loop wait for it; as soon as the delay is detected, new ones get another loop."""
    monkeypatch.setattr(environment, "MAX_HEARTBEAT_AGE_S", 0.5)
    longest = 0.0

    async def drive() -> list[Sample]:
        async def watch() -> None:
            nonlocal longest
            while True:
                began = time.monotonic()
                await asyncio.sleep(0.01)
                longest = max(longest, time.monotonic() - began)

        async def start(index: int) -> Any:
            return Caller()

        watching = asyncio.create_task(watch())
        pool = await ReplicaPool.start(
            start, 1, max_in_flight=64, turn_runner=TurnSessions(found("Blocks"), tokenizer, 3, ChatReplies(tokenizer))
        )
        first = asyncio.create_task(pool.sample(GenerationRequest(Sample("p", "g", [1]), 500, deadline_s=0.4, problem=2.0)))
        await asyncio.sleep(0.9)
        second = await pool.sample(GenerationRequest(Sample("q", "g", [1]), 500, deadline_s=2.0, problem=0.0))
        watching.cancel()
        await pool.close()
        return [await first, second]

    first, second = asyncio.run(drive())
    assert (first.finish_reason, second.finish_reason) == (DEADLINE, "stop")
    assert second.environment is not None and second.environment.turns == 2
    assert longest < 0.3


def test_cancelled_response_closes_its_environment(tokenizer: Tokenizer) -> None:
    CLOSED.clear()

    async def drive() -> Sample:
        async def start(index: int) -> Any:
            return Caller()

        pool = await ReplicaPool.start(
            start, 1, max_in_flight=4, turn_runner=TurnSessions(found("Hangs"), tokenizer, 3, ChatReplies(tokenizer))
        )
        unwanted, cancelled = Unwanted(), GenerationRequest(Sample("q", "g", [1]), 500, problem="cancelled")
        request = GenerationRequest(Sample("p", "g", [1]), 500, problem="unwanted", unwanted=unwanted)
        first, second = asyncio.create_task(pool.sample(request)), asyncio.create_task(pool.sample(cancelled))
        await asyncio.sleep(0.1)
        unwanted.set()
        second.cancel()
        sample = await first
        await pool.close()
        return sample

    assert asyncio.run(drive()).finish_reason == "abort"
    assert sorted(map(str, CLOSED)) == ["cancelled", "unwanted"]


def test_first_failure_of_each_line_is_reported() -> None:
    failures = Failures()

    def report(failure: str) -> str | None:
        return failures.unreported(Sample("p", "g", [1], environment=EnvironmentUse(errors=1, failure=failure)))

    assert report("tool.py:12: KeyError: 'a'") == (
        "rollout.environment: tool.py:12: KeyError: 'a'; the response ended there (environment/errors counts them)"
    )
    assert report("tool.py:12: KeyError: 'b'") is None
    assert report("tool.py:13: KeyError: 'a'") is not None
    assert report("") is None and failures.unreported(Sample("p", "g", [1])) is None


# ------------------------------------------------------------------------------------- what is refused before anything starts


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("calculater", "mtpctl has no environment 'calculater'; did you mean calculator?"),
        ("browser", "mtpctl has no environment 'browser'; built in are single, calculator"),
    ],
)
def test_unknown_name_is_reported_with_the_closest_one(name: str, said: str) -> None:
    (complaint,) = check_environment(VllmConfig(environment=name))
    assert complaint.startswith(f"rollout.environment: {said}")


def test_arguments_without_an_environment_are_refused() -> None:
    (complaint,) = check_environment(VllmConfig(environment_args={"times": 2}))
    assert complaint.startswith("rollout.environment_args: there is no environment")


@pytest.mark.parametrize(
    ("reference", "args", "message"),
    [
        ("nowhere.py:Echo", {}, r"there is no file nowhere\.py"),
        (f"{FILE}:Ecco", {}, r".* defines no Ecco; did you mean Echo\?"),
        ("no_such_module_here:Echo", {}, r"there is no module no_such_module_here"),
        (f"{FILE}:function", {}, r".*:function is not a class; name one with `stop` and `reply\(self, turn\)`"),
        (f"{FILE}:NoReply", {}, r"NoReply has no method `reply\(self, turn\)`; add one"),
        (f"{FILE}:ReplyOfTwo", {}, r"reply\(.*\).* cannot be called as reply\(self, turn\): .*history.*"),
        (f"{FILE}:Echo", {"tims": 3}, r"Echo\(.*\).* cannot be called as Echo\(problem, tims=3\): .*tims.*"),
    ],
)
def test_invalid_environment_class_gives_a_one_line_error(reference: str, args: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=rf"^rollout\.environment: {message}") as caught:
        load_environment_class(VllmConfig(environment=reference, environment_args=args))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raises", r"user_environments\.py:\d+: KeyError: .*"),
        ("Number", r"user_environments\.py:\d+: Number\.reply returned int.*"),
        ("NoStop", r"user_environments\.py:\d+: NoStop\.stop is missing.*"),
        ("FailsAtBirth", r"user_environments\.py:\d+: ValueError: no board"),
        ("NaN", r"user_environments\.py:\d+: NaN\.reward returned nan.*"),
        ("Messages", r"it replies with chat messages; set data\.chat_template: true, or return text"),
        ("WithTools", r".*WithTools\.tools is for the chat template; set data\.chat_template: true, or remove it"),
        ("SpecialStop", r"stop: '<eos>' is a special token, .* set stop = \[\] to end turns at the end token"),
    ],
)
def test_failing_environment_is_rejected_in_the_trial_with_its_line(tokenizer: Tokenizer, name: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"^rollout\.environment: {message}$"):
        try_environment(found(name), ["a", "b", "c", "d"], chat=False).check_text(tokenizer)


def test_stop_string_may_be_whitespace(tokenizer: Tokenizer) -> None:
    try_environment(found("BlankLineStop"), ["a"], chat=False).check_text(tokenizer)


def test_three_rows_are_tried_and_closed() -> None:
    CLOSED.clear()
    assert try_environment(found("Echo"), ["a", "b", "c", "d"], chat=False).tools == []
    assert CLOSED == ["a", "b", "c"]


def test_hanging_environment_is_reported_by_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpctl.environments.trial.TRIAL_TIMEOUT_S", 0.2)
    with pytest.raises(UserError, match=r"Hangs\.reply took longer than 0\.2 s; make it return"):
        try_environment(found("Hangs"), ["a"], chat=False)


def test_the_trial_takes_no_longer_than_a_response_may() -> None:
    with pytest.raises(UserError, match=r"Hangs\.reply took longer than 0\.2 s; make it return"):
        try_environment(found("Hangs"), ["a"], chat=False, deadline_s=0.2)


def test_tools_are_requested_once() -> None:
    (tool,) = try_environment(found("WithTools"), ["a", "b"], chat=True).tools
    assert tool["function"]["name"] == "echo"  # type: ignore[index]
