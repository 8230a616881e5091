"""Held-out sets by name: what is asked for, what it is worth, and that training does not wait for it."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from mtpctl.controller.evaluate import evaluate
from mtpctl.controller.prepare import Prepared
from mtpctl.controller.set_rewards import Score, by_answer, rewards_of
from mtpctl.data.problems import Problem
from mtpctl.data.sets import UNNAMED, ProblemSets
from mtpctl.errors import RuntimeFailure, UserError
from mtpctl.recipe.evaluation import EvaluationConfig
from mtpctl.recipe.schema import Recipe
from mtpctl.samples import GenerationRequest, Sample
from tests.controller.test_rl import FakeGenerator, Letters, World, recipe_of, stage_of


def with_sets(recipe: Recipe, *, wait: bool = False, **sets: dict[str, Any]) -> Recipe:
    return recipe.model_copy(update={"evaluation": EvaluationConfig.model_validate({"sets": sets, "wait": wait})})


async def equal(response: str, problem: Problem, sample: Sample) -> float:
    return float(response == problem.answer)


def measured(recipe: Recipe, named: dict[str, list[Problem]], **options: Any) -> tuple[dict[str, float], list[GenerationRequest]]:
    """The metrics of one evaluation in which every response is its own index, and what was asked for."""
    asked: list[GenerationRequest] = []
    rewards: dict[str, Score] = options.pop("rewards", {UNNAMED: equal})

    class Noting(FakeGenerator):
        async def generate(self, requests: Any) -> Any:
            async def noted() -> Any:
                async for request in requests:
                    asked.append(request)
                    yield request

            async for sample in super().generate(noted()):
                yield sample

    prepared = Prepared(cast(Any, None), Letters(), ProblemSets([], named.pop("", []), [], named), context=64)
    generator = cast(Any, Noting(World(), lambda s: str(s.index)))
    return asyncio.run(evaluate(recipe, prepared, generator, rewards, **options)), asked


def test_each_set_has_its_own_n_temperature_and_length_and_its_metrics_their_own_names() -> None:
    recipe = with_sets(recipe_of(), easy={"path": "e", "n": 4, "temperature": 0.5, "max_tokens": 7}, hard={"path": "h"})
    problems = {"": [Problem("p", "x", "0")], "easy": [Problem("p", "x", "3"), Problem("q", "y", "9")], "hard": [Problem("p", "z", "1")]}
    metrics, asked = measured(recipe, problems)
    assert metrics["eval/accuracy"] == 1.0 and metrics["eval/problems"] == 1.0
    assert [metrics[f"eval/easy/{name}"] for name in ("avg@4", "pass@1", "pass@2", "pass@4")] == pytest.approx([1 / 8, 1 / 8, 1 / 4, 1 / 2])
    assert metrics["eval/hard/avg@1"] == metrics["eval/hard/pass@1"] == 0.0
    assert [(len(s), s[0].temperature, s[0].max_tokens) for s in (asked[:1], asked[1:9], asked[9:])] == [
        (1, 1.0, 63),
        (8, 0.5, 7),
        (1, 1.0, 63),
    ]
    assert len({(request.sample.group_id, request.sample.index) for request in asked}) == 10


def test_n_replaces_what_the_sets_ask_for() -> None:
    metrics, asked = measured(
        with_sets(recipe_of(), a={"path": "a", "n": 8}), {"": [Problem("p", "x", "0")], "a": [Problem("p", "x", "1")]}, n=2
    )
    assert len(asked) == 4
    assert (metrics["eval/accuracy"], metrics["eval/pass@2"], metrics["eval/a/pass@2"]) == (0.5, 1.0, 1.0)


def test_a_reward_between_right_and_wrong_counts_as_right_from_where_the_set_says() -> None:
    async def half(response: str, problem: Problem, sample: Sample) -> float:
        return 0.5

    named = {"a": [Problem("p", "x", "1")]}
    strict, _ = measured(with_sets(recipe_of(), a={"path": "a"}), dict(named), rewards={UNNAMED: equal, "a": half})
    loose, _ = measured(with_sets(recipe_of(), a={"path": "a", "right_from": 0.5}), dict(named), rewards={UNNAMED: equal, "a": half})
    assert [found["eval/a/avg@1"] for found in (strict, loose)] == [0.5, 0.5]
    assert [found["eval/a/pass@1"] for found in (strict, loose)] == [0.0, 1.0]


def test_responses_are_rewarded_side_by_side() -> None:
    together, most = 0, 0

    async def slow(response: str, problem: Problem, sample: Sample) -> float:
        nonlocal together, most
        together += 1
        most = max(most, together)
        await asyncio.sleep(0.02)
        together -= 1
        return 1.0

    measured(recipe_of(), {"": [Problem(f"p{i}", "x", "1") for i in range(20)]}, rewards={UNNAMED: slow})
    assert most == 20


def test_a_reward_that_fails_ends_the_evaluation_with_its_own_error() -> None:
    async def broken(response: str, problem: Problem, sample: Sample) -> float:
        raise RuntimeFailure("judge.py:3: KeyError: 'x'")

    with pytest.raises(RuntimeFailure, match=r"^judge\.py:3: KeyError"):
        measured(recipe_of(), {"": [Problem("p", "x", "1")]}, rewards={UNNAMED: broken})


def test_a_set_takes_a_function_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "async def score(response, problem, sample, bonus=0.0):\n    return {'reward': len(response) + bonus, 'part': 1}\n"
        "def plain(response, problem, sample):\n    return problem.fields['worth']\n"
    )
    sets = {
        "a": {"path": "a", "reward": {"function": f"{tmp_path}/judge.py:score", "args": {"bonus": 0.25}}},
        "b": {"path": "b", "reward": {"function": f"{tmp_path}/judge.py:plain"}},
        "c": {"path": "c"},
    }
    rewards = rewards_of(EvaluationConfig.model_validate({"sets": sets}))
    assert set(rewards) == {"a", "b"}
    sample, problem = Sample("p", "g", [1]), Problem("p", "x", "1", fields={"worth": 2})
    assert asyncio.run(rewards["a"]("1234", problem, sample)) == 4.25  # type: ignore[arg-type]
    assert asyncio.run(rewards["b"]("1234", problem, sample)) == 2.0  # type: ignore[arg-type]
    with pytest.raises(RuntimeFailure, match=r"^evaluation\.sets\.b\.reward\.function: q: judge\.py:4: KeyError: 'worth'"):
        asyncio.run(rewards["b"]("", Problem("q", "x", "1"), sample))  # type: ignore[arg-type]
    wrong = {"a": {"path": "a", "reward": {"function": f"{tmp_path}/judge.py:plain", "args": {"bonus": 1}}}}
    with pytest.raises(UserError, match=r"^evaluation\.sets\.a\.reward\.function: plain.* cannot be called"):
        rewards_of(EvaluationConfig.model_validate({"sets": wrong}))


def test_a_checker_runs_off_the_event_loop() -> None:
    threads: list[threading.Thread] = []

    def checker(response: str, answer: str) -> float:
        threads.append(threading.current_thread())
        return 1.0

    assert asyncio.run(by_answer(checker)("1", Problem("p", "x", "1"), Sample("p", "g", [1]))) == 1.0  # type: ignore[arg-type]
    assert threads[0] is not threading.main_thread()


class SlowHeldOut(FakeGenerator):
    """Responses to held-out problems take as long as several updates, and end under the version that is published then."""

    async def generate(self, requests: Any) -> Any:
        async for sample in super().generate(requests):
            if sample.group_id.startswith("eval-"):
                sample.version_spans[-1].version = self.world.version
            yield sample

    async def wait(self, sample: Sample) -> None:
        await asyncio.sleep(0.12 if sample.group_id.startswith("eval-") else 0.001)


def trained(tmp_path: Path, *, wait: bool, deterministic: bool = False) -> tuple[World, list[int]]:
    """A run of six updates that is evaluated after every second one; and after how many updates each row was logged."""
    world = World()
    recipe = with_sets(recipe_of(steps=6, deterministic=deterministic), wait=wait)
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"eval_every": 2})})
    done: list[int] = []

    async def scenario() -> None:
        stage = stage_of(recipe, world, tmp_path, generator=SlowHeldOut(world, lambda s: str(s.index)))
        stage.prepared = replace(stage.prepared, problems=ProblemSets(stage.prepared.problems.train, [Problem("e0", "0", "0")], []))
        log = stage.telemetry.log

        def noted(step: int, metrics: Any, phase: str) -> None:
            if "eval/accuracy" in metrics:
                done.append(stage.state.step)
            log(step, metrics, phase)

        stage.telemetry.log = noted  # type: ignore[method-assign]
        await asyncio.wait_for(stage.run(), 20)

    asyncio.run(scenario())
    return world, done


def test_training_goes_on_beside_an_evaluation_whose_row_tells_its_step_and_what_is_mixed(tmp_path: Path) -> None:
    world, done = trained(tmp_path, wait=False)
    rows = [(step, metrics) for step, metrics in world.rows if "eval/accuracy" in metrics]
    assert [step for step, _ in rows] == [0, 2, 4, 6]
    assert done[0] > 0 and done[1] > 2, "updates were made while it was under way"
    assert [metrics["eval/version"] for _, metrics in rows] == [0.0, 2.0, 4.0, 6.0]
    assert rows[0][1]["eval/mixed_fraction"] == 1.0 and rows[-1][1]["eval/mixed_fraction"] == 0.0
    assert len(world.batches) == 6


@pytest.mark.parametrize(("wait", "deterministic"), [(True, False), (False, True)])
def test_training_waits_where_the_recipe_says_so_or_is_deterministic(tmp_path: Path, wait: bool, deterministic: bool) -> None:
    world, done = trained(tmp_path, wait=wait, deterministic=deterministic)
    assert done == [0, 2, 4, 6]
    assert [metrics["eval/mixed_fraction"] for _, metrics in world.rows if "eval/accuracy" in metrics] == [0.0] * 4


def test_a_stop_does_not_wait_for_the_evaluation_under_way_and_says_so(tmp_path: Path) -> None:
    world = World()

    class Never(FakeGenerator):
        async def wait(self, sample: Sample) -> None:
            await asyncio.sleep(60 if sample.group_id.startswith("eval-") else 0.001)

    async def scenario() -> None:
        stage = stage_of(recipe_of(), world, tmp_path, generator=Never(world, lambda s: str(s.index)))
        stage.prepared = replace(stage.prepared, problems=ProblemSets(stage.prepared.problems.train, [Problem("e0", "e", "0")], []))
        asyncio.get_running_loop().call_later(0.05, stage.state.stopping.set)
        await asyncio.wait_for(stage.run(), 10)

    asyncio.run(scenario())
    assert world.events == [("eval", "the evaluation under way has no result: the stage ended first")]
