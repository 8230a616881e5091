"""Environments of the package verifiers are played as they are, against the gateway: their tasks, their turns, their rewards."""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import json
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest

from mtpctl.data.problems import Problem
from mtpctl.data.sets import ProblemSets, first_problems, load_held_out, load_problem_sets
from mtpctl.environments import verifiers
from mtpctl.environments.agents import open_generator
from mtpctl.environments.built_in import environment_reward
from mtpctl.environments.gateway.server import Gateway
from mtpctl.environments.trial import try_episodes
from mtpctl.errors import PrerequisiteMissing, RuntimeFailure, UserError
from mtpctl.recipe.data import DataConfig, EvaluationConfig
from mtpctl.recipe.rollout import VllmConfig
from mtpctl.rl.rewards.function import Outcome
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.web.server import listen
from tests.fakes.scripted_engine import EOS, Says, Scripted, byte_tokenizer, model_of, request_of
from tests.fakes.trajectories import sampled

vf = pytest.importorskip("verifiers.v1", reason="the extra verifiers is not installed")

TASKSETS = Path(__file__).parent / "tasksets"
HERE = {"agent": {"runtime": {"type": "subprocess"}}}


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environments of `tests/environments/tasksets` count as installed, here and in processes that are started."""
    monkeypatch.syspath_prepend(str(TASKSETS))
    monkeypatch.setenv("PYTHONPATH", str(TASKSETS), prepend=":")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    yield


def rollout_of(name: str, **fields: Any) -> VllmConfig:
    return VllmConfig.model_validate({"engine": "vllm", "environment": f"verifiers:{name}", "environment_args": HERE, **fields})


def problem_sets(rollout: VllmConfig, **data: Any) -> ProblemSets:
    return load_problem_sets(DataConfig.model_validate({"taskset": data} if data else {}), 0, stages=["rl"], rollout=rollout)


def played(rollout: VllmConfig, problems: list[Problem], says: Says, *, context: int = 4096, max_tokens: int = 400) -> dict[str, Sample]:
    """The results of the problems, by their ids."""

    async def all_requests() -> AsyncIterator[GenerationRequest]:
        for number, problem in enumerate(problems):
            request = GenerationRequest(Sample(problem.prompt_id, f"g{number}", [1]), max_tokens, stop_token_ids=[EOS], deadline_s=120.0)
            request.problem = problem
            yield request

    async def run() -> dict[str, Sample]:
        engines = cast(ReplicaPool, Engines(Scripted(says)))
        async with open_generator(rollout, engines, byte_tokenizer(), context=context, name="toy", report=lambda line: None) as generator:
            return {sample.prompt_id: sample async for sample in generator.generate(all_requests())}

    return asyncio.run(run())


class Engines:
    """A pool as far as agents know it."""

    def __init__(self, engine: Scripted) -> None:
        self.sample = engine


@dataclass
class Episode:
    """The result of an episode, the samples of its trajectory, and its number of answers."""

    outcome: dict[str, float]
    samples: list[Sample]
    answers: int


def episodes(rollout: VllmConfig, problem: Problem, says: Says, *, count: int = 1, turns: int = 8, **request: Any) -> list[Episode]:
    """Episodes of a problem, one after another, played in this process: it has imported verifiers already."""

    async def run() -> list[Episode]:
        (_, args), result = rollout.started_agent or ("", {}), []
        async with Gateway(model_of(Scripted(says)), byte_tokenizer(), "toy", turns, listen("127.0.0.1", 0)) as gateway:
            for _ in range(count):
                secret, trajectory = gateway.open(request_of(**request))
                outcome = await verifiers.play(problem, gateway.base_url(secret), **cast(Any, args))
                result.append(Episode(outcome, gateway.close(secret), trajectory.answers))
        return result

    with mock.patch.object(verifiers, "_environments", {}):
        return asyncio.run(run())


def text(sample: Sample) -> str:
    return byte_tokenizer().decode(sample.response_ids, special=True)


def test_tasks_are_problems_and_their_rewards_the_samples() -> None:
    rollout = rollout_of("last_letter")
    problems = problem_sets(rollout).train
    data = {"idx": 1, "prompt": "last letter of tiger:", "answer": "r"}
    assert problems[1] == Problem("last_letter/train/1", "last letter of tiger:", "r", fields=data)
    result = played(rollout, problems[:3], lambda before, call: "n" if "lemon" in before else "a long answer")
    lemon, tiger = result["last_letter/train/2"], result["last_letter/train/1"]
    assert (lemon.environment_reward, lemon.reward_parts) == (1.25, {"right": 1.0, "short": 1.0, "letters": 1.0})
    assert (tiger.environment_reward, tiger.reward_parts) == (0.0, {"right": 0.0, "short": 0.0, "letters": 13.0})
    assert text(lemon) == "n<eos>" and bytes(sampled(lemon)[:-1]) == b"n" and not lemon.earlier
    assert environment_reward("n", problems[2], lemon) == {"reward": 1.25, "right": 1.0, "short": 1.0, "letters": 1.0}


def test_turns_of_the_environment_are_masked_in_one_sample() -> None:
    guesses = {"1 to 8?": "5", "lower": "2", "higher": "3"}

    def says(before: str, call: int) -> str:
        return guesses[max(guesses, key=before.rfind)]

    rollout = rollout_of("guess_number", environment_args={})
    problems = problem_sets(rollout, eval_size=2)
    assert [problem.prompt for problem in problems.evaluation] == ["number 1", "number 2"]  # a task whose user opens has no prompt
    (three,) = episodes(rollout, problems.train[0], says)
    (sample,) = three.samples
    assert three.outcome == {"reward": 1.0, "guessed": 1.0} and three.answers == 3
    assert text(sample) == "5<eos>user: lower\nassistant: 2<eos>user: higher\nassistant: 3<eos>"
    assert bytes(token for token in sampled(sample) if token < 256) == b"523"
    (four,) = episodes(rollout, problems.train[1], says)  # higher than 3, and 3 again: until its turns are over
    assert four.outcome["reward"] == 0.0 and four.answers == 6 and len(four.samples) == 1


@pytest.mark.slow
def test_tools_are_called_in_the_environments_own_servers_by_the_harness_null() -> None:
    def says(before: str, call: int) -> str:
        summands = before.partition("user: ")[2].partition("=")[0].partition("+")
        sum_of = json.dumps({"name": "sums_add", "arguments": {"first": int(summands[0]), "second": int(summands[2])}})
        return before.rpartition("tool: ")[2].partition("\n")[0] if "tool: " in before else f"<tool_call>{sum_of}</tool_call>"

    seat = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    rollout = rollout_of("sums_tool", environment_args={"agent": seat}, tool_parser="hermes")
    result = played(rollout, problem_sets(rollout).train[:2], says)
    for number, sample in enumerate(result[f"sums_tool/train/{each}"] for each in range(2)):
        assert sample.environment is not None and not sample.environment.failure
        assert (sample.environment_reward, sample.environment.turns, sample.environment.rewritten) == (1.0, 2, 0)
        assert text(sample).endswith(f"</tool_call><eos>tool: {21 + 2 * number}\nassistant: {21 + 2 * number}<eos>")


def test_an_episode_ends_with_its_turns_and_is_rewarded() -> None:
    rollout = rollout_of("guess_number", environment_args={}, max_turns=2)
    problems = problem_sets(rollout).train
    for problem, reward in ((problems[4], 1.0), (problems[5], 0.0)):
        (result,) = episodes(rollout, problem, lambda before, call: "5" if "higher" in before else "2", turns=2)
        assert (result.outcome["reward"], result.answers) == (reward, 2)


def test_trajectory_without_room_has_no_sample_and_no_failure() -> None:
    rollout = rollout_of("guess_number", environment_args={})
    assert episodes(rollout, problem_sets(rollout).train[4], lambda before, call: "2", max_tokens=20)[0].outcome == {"reward": 0.0}


def test_failed_episode_is_reported() -> None:
    args = {"agent": {**HERE["agent"], "harness": {"id": "last_letter", "fails": True}}}
    rollout = rollout_of("last_letter", environment_args=args)
    problems = problem_sets(rollout).train
    with pytest.raises(RuntimeFailure, match=r"^HarnessError: .*the harness is broken"):
        episodes(rollout, problems[0], lambda before, call: "d")
    with pytest.raises(UserError, match=r"rollout\.environment: verifiers:last_letter: .*the harness is broken.*last_letter/train/0"):
        try_episodes(rollout, problems)


def test_the_trial_plays_three_problems_with_their_own_answers() -> None:
    rollout = rollout_of("last_letter")
    try_episodes(rollout, problem_sets(rollout).train)
    bad = rollout_of("last_letter", environment_args={"agent": {"runtime": {"type": "prime"}}})
    with pytest.raises(PrerequisiteMissing, match=r"rollout\.environment_args: agent runs in a sandbox of Prime Intellect"):
        try_episodes(bad, problem_sets(bad).train[:1])


def test_held_out_tasks_follow_the_recipe() -> None:
    plain = rollout_of("last_letter")
    sets = problem_sets(plain, train_size=4, eval_size=3)
    assert [problem.answer for problem in sets.evaluation] == ["d", "r", "n"]
    assert [problem.answer for problem in sets.train] == ["d", "r", "c", "r"]
    other = rollout_of("last_letter", environment_eval_args={"taskset": {"split": "test"}})
    sets = problem_sets(other, eval_size=2)
    assert len(sets.train) == 8 and [problem.prompt_id for problem in sets.evaluation] == ["last_letter/eval/0", "last_letter/eval/1"]
    assert sets.evaluation[0].prompt == "last letter of glass:"
    assert load_held_out(DataConfig(), 0, EvaluationConfig(), other).evaluation == problem_sets(other).evaluation
    first = first_problems(DataConfig(), 0, EvaluationConfig(), 3, other)
    assert [len(first[role]) for role in ("train", "eval")] == [3, 3]
    first = first_problems(DataConfig.model_validate({"taskset": {"eval_size": 5}}), 0, EvaluationConfig(), 2, plain)
    assert [len(first[role]) for role in ("train", "eval")] == [2, 2]
    with pytest.raises(UserError, match=r"data\.taskset\.eval_size: 8 would hold out all 8 tasks"):
        problem_sets(plain, eval_size=8)


def test_tasks_without_end_need_a_size() -> None:
    rollout = rollout_of("last_letter", environment_args={**HERE, "taskset": {"endless": True}})
    with pytest.raises(UserError, match=r"data\.taskset\.train_size: verifiers:last_letter has infinitely many tasks"):
        problem_sets(rollout)
    sets = problem_sets(rollout, train_size=20, eval_size=5)
    assert (len(sets.train), len(sets.evaluation)) == (20, 5)


@pytest.mark.parametrize(
    "name, fields, message",
    [
        ("nothing_here", {}, r"rollout\.environment: verifiers:nothing_here: .*not found"),
        ("last_letter", {"environment_args": {"taskset": {"splt": "x"}}}, r"rollout\.environment_args\.taskset\.splt: "),
        ("last_letter", {"environment_args": {"taskset": {"split": "x"}}}, r"rollout\.environment: verifiers:last_letter: KeyError: 'x'"),
        ("last_letter", {"environment_eval_args": {"taskset": {"split": 3}}}, r"rollout\.environment_eval_args\.taskset\.split: "),
    ],
)
def test_errors_are_one_line_with_the_recipe_key(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        problem_sets(rollout_of(name, **fields))


def test_environment_that_failed_to_load_is_loaded_again_by_the_next_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = rollout_of("last_letter")
    problem, load, loads = problem_sets(rollout).train[0], vf.load_environment, 0

    def load_environment(config: Any) -> Any:
        nonlocal loads
        loads += 1
        if loads == 1:
            raise ConnectionError("the hub does not answer")
        return load(config)

    monkeypatch.setattr(vf, "load_environment", load_environment)

    async def run() -> float:
        (_, args), play = rollout.started_agent or ("", {}), verifiers.play
        async with Gateway(model_of(Scripted(lambda before, call: "d")), byte_tokenizer(), "toy", 8, listen("127.0.0.1", 0)) as gateway:
            secrets = [gateway.open(request_of())[0] for _ in range(3)]
            urls = [gateway.base_url(secret) for secret in secrets]
            # Concurrent episodes share a failed load, so it is not repeated for each.
            failed = await asyncio.gather(*(play(problem, url, **cast(Any, args)) for url in urls[:2]), return_exceptions=True)
            assert [str(error) for error in failed] == 2 * ["the hub does not answer"] and loads == 1
            return (await play(problem, urls[2], **cast(Any, args)))["reward"]

    with mock.patch.object(verifiers, "_environments", {}):
        assert asyncio.run(run()) == 1.25
    assert loads == 2


def test_untrained_agent_needs_its_own_model() -> None:
    seats = {"assistant": HERE["agent"], "user": {**HERE["agent"], "harness": {"id": "last_letter"}}}
    rollout = rollout_of("last_letter", environment_args={"id": "user-sim", **seats})
    with pytest.raises(UserError, match="user is not trainable but uses the policy"):
        episodes(rollout, problem_sets(rollout).train[0], lambda before, call: "d")


def test_several_plays_in_one_episode_are_refused() -> None:
    rollout = rollout_of("last_letter", environment_args={"id": "best-of-n", "n": 2, **HERE})
    with pytest.raises(UserError, match="the policy plays 2 times in one episode"):
        episodes(rollout, problem_sets(rollout).train[0], lambda before, call: "d")


def test_finished_episode_leaves_no_http_client() -> None:
    from verifiers.v1.clients.eval import EvalClient

    rollout = rollout_of("last_letter")
    result = episodes(rollout, problem_sets(rollout).train[0], lambda before, call: "d", count=6)
    gc.collect()
    assert [each.outcome["reward"] for each in result] == [1.25] * 6
    assert sum(isinstance(each, EvalClient) for each in gc.get_objects()) <= 1


@pytest.mark.parametrize("prompt_id", ["rows.jsonl:1", "math/train/rows.jsonl:1", "owner/name/eval/train:1"])
def test_rows_of_a_file_are_tasks_too(prompt_id: str) -> None:
    row = Problem(prompt_id, "last letter of mango:", "o", fields={"name": "mango"})
    assert episodes(rollout_of("last_letter"), row, lambda before, call: "o")[0].outcome["reward"] == 1.25


@pytest.mark.parametrize("result", [None, "0.3.1"])
def test_missing_package_error_has_the_install_command(result: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if result is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return result

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(PrerequisiteMissing, match=r"rollout\.environment: .*; uv pip install verifiers==0\.4\.0") as caught:
        problem_sets(rollout_of("last_letter"))
    assert caught.value.exit_code == 3 and (result or "not installed") in str(caught.value)


def test_outcome_renames_metrics_with_reserved_names() -> None:
    from types import SimpleNamespace as Made

    from mtpctl.environments.verifiers import episode_rewards

    agent = Made(name="agent", trainable=True, config=Made(client=Made(base_url="here")))
    rewards = {"mean": Made(score=0.5), "unscored": None}
    trace = Made(agent=agent, ok=True, last_error=None, reward=0.5, rewards=rewards, metrics={"reward": 2.0})
    result = episode_rewards(Made(traces=[trace], errors=[]), "here")
    assert result == {"reward": 0.5, "mean_": 0.5, "reward_": 2.0}
    from mtpctl.rl.rewards.function import parse

    assert Outcome(*parse(result)).reward == 0.5
