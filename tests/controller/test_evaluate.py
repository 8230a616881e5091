"""Named held-out sets: requests, accuracy, and evaluation concurrent with training."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any, cast

import pytest

from mtpctl.controller.evaluate import evaluate
from mtpctl.controller.prepare import Prepared
from mtpctl.controller.services import start_rewards
from mtpctl.data.problems import Problem
from mtpctl.data.sets import UNNAMED, ProblemSets
from mtpctl.errors import RuntimeFailure, UserError
from mtpctl.recipe.data import EvaluationConfig
from mtpctl.recipe.schema import Recipe
from mtpctl.rl.rewards.function import Outcome, Reward
from mtpctl.samples import GenerationRequest, Sample
from tests.fakes.rl_stage import FakeGenerator, Letters, World, recipe_of


def with_sets(recipe: Recipe, *, wait: bool = False, **sets: dict[str, Any]) -> Recipe:
    return recipe.model_copy(update={"evaluation": EvaluationConfig.model_validate({"sets": sets, "wait": wait})})


async def equal(response: str, problem: Problem, sample: Sample) -> float:
    return float(response == problem.answer)


def valued(function: Any) -> Reward:
    """A reward of a function that returns a number."""

    async def reward(response: str, problem: Any, sample: Sample) -> Outcome:
        return Outcome(await function(response, problem, sample))

    return reward


def measured(recipe: Recipe, named: dict[str, list[Problem]], **options: Any) -> tuple[dict[str, float], list[GenerationRequest]]:
    """The metrics of one evaluation in which every response is its own index, and the requests."""
    requested: list[GenerationRequest] = []
    rewards: dict[str, Any] = {name: valued(each) for name, each in options.pop("rewards", {UNNAMED: equal}).items()}
    rewards |= options.pop("outcomes", {})

    class Noting(FakeGenerator):
        async def generate(self, requests: Any) -> Any:
            async def noted() -> Any:
                async for request in requests:
                    requested.append(request)
                    yield request

            async for sample in super().generate(noted()):
                yield sample

    seen_hashes = frozenset(Problem("p", prompt, "").prompt_hash for prompt in options.pop("seen", ()))
    prepared = Prepared(cast(Any, None), Letters(), ProblemSets([], named.pop("", []), [], named, seen_hashes), context=64)
    generator = cast(Any, Noting(World(), lambda s: str(s.index)))
    return asyncio.run(evaluate(recipe, prepared, generator, rewards, **options)), requested


def test_each_set_has_its_own_sampling_and_metric_names() -> None:
    recipe = with_sets(recipe_of(), easy={"path": "e", "n": 4, "temperature": 0.5, "max_tokens": 7}, hard={"path": "h"})
    problems = {"": [Problem("p", "x", "0")], "easy": [Problem("p", "x", "3"), Problem("q", "y", "9")], "hard": [Problem("p", "z", "1")]}
    metrics, requested = measured(recipe, problems)
    assert metrics["eval/accuracy"] == 1.0 and metrics["eval/problems"] == 1.0
    assert [metrics[f"eval/easy/{name}"] for name in ("avg@4", "pass@1", "pass@2", "pass@4")] == pytest.approx([1 / 8, 1 / 8, 1 / 4, 1 / 2])
    assert metrics["eval/hard/avg@1"] == metrics["eval/hard/pass@1"] == 0.0
    assert [(len(s), s[0].temperature, s[0].max_tokens) for s in (requested[:1], requested[1:9], requested[9:])] == [
        (1, 1.0, 63),
        (8, 0.5, 7),
        (1, 1.0, 63),
    ]
    assert len({(request.sample.group_id, request.sample.index) for request in requested}) == 10


def test_accuracy_on_unseen_prompts_is_separate() -> None:
    """The response is `0`: correct for the prompts a and b, of which a is trained on."""
    problems = [Problem("p", prompt, "0" if prompt in "ab" else "1") for prompt in "abcd"]
    recipe = with_sets(recipe_of(), named={"path": "a"})
    metrics, _ = measured(recipe, {"": problems, "named": problems}, seen=["a"])
    assert (metrics["eval/accuracy"], metrics["eval/unseen_accuracy"], metrics["eval/unseen_problems"]) == pytest.approx((0.5, 1 / 3, 3))
    assert (metrics["eval/named/avg@1"], metrics["eval/named/unseen_avg@1"]) == pytest.approx((0.5, 1 / 3))
    metrics, _ = measured(recipe_of(), {"": problems}, seen=["other"])
    assert not [name for name in metrics if "unseen" in name]
    metrics, _ = measured(recipe_of(), {"": problems}, seen=list("abcd"))
    assert metrics["eval/unseen_problems"] == 0 and "eval/unseen_accuracy" not in metrics


def test_n_overrides_the_n_of_sets() -> None:
    metrics, requested = measured(
        with_sets(recipe_of(), a={"path": "a", "n": 8}), {"": [Problem("p", "x", "0")], "a": [Problem("p", "x", "1")]}, n=2
    )
    assert len(requested) == 4
    assert (metrics["eval/accuracy"], metrics["eval/pass@2"], metrics["eval/a/pass@2"]) == (0.5, 1.0, 1.0)


def test_reward_counts_as_correct_from_the_threshold_of_the_set() -> None:
    async def half(response: str, problem: Problem, sample: Sample) -> float:
        return 0.5

    named = {"a": [Problem("p", "x", "1")]}
    strict, _ = measured(with_sets(recipe_of(), a={"path": "a"}), dict(named), rewards={UNNAMED: equal, "a": half})
    loose, _ = measured(with_sets(recipe_of(), a={"path": "a", "right_from": 0.5}), dict(named), rewards={UNNAMED: equal, "a": half})
    assert [result["eval/a/avg@1"] for result in (strict, loose)] == [0.5, 0.5]
    assert [result["eval/a/pass@1"] for result in (strict, loose)] == [0.0, 1.0]


def test_part_correct_of_a_reward_is_counted_instead_of_the_reward() -> None:
    """The response is `0`, which has partial credit for the problems that it does not solve."""

    async def partial(response: str, problem: Problem, sample: Sample) -> Outcome:
        correct = float(response == problem.answer)
        return Outcome(0.5 + 0.5 * correct, {"correct": correct})

    problems = [Problem("p", prompt, answer) for prompt, answer in (("a", "0"), ("b", "1"), ("c", "1"), ("d", "1"))]
    recipe = with_sets(recipe_of(), named={"path": "n", "right_from": 0.5})
    named = {UNNAMED: problems, "named": list(problems)}
    metrics, _ = measured(recipe, named, outcomes={UNNAMED: partial}, seen=["a"])
    assert metrics["eval/accuracy"] == metrics["eval/named/avg@1"] == metrics["eval/named/pass@1"] == 0.25
    assert metrics["eval/unseen_accuracy"] == 0.0


def test_responses_are_rewarded_concurrently() -> None:
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


def test_failing_reward_ends_the_evaluation_with_its_error() -> None:
    async def broken(response: str, problem: Problem, sample: Sample) -> float:
        raise RuntimeFailure("judge.py:3: KeyError: 'x'")

    with pytest.raises(RuntimeFailure, match=r"^judge\.py:3: KeyError"):
        measured(recipe_of(), {"": [Problem("p", "x", "1")]}, rewards={UNNAMED: broken})


def test_set_uses_its_own_reward_function_and_others_the_recipes(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "async def score(response, problem, sample, bonus=0.0):\n    return {'reward': len(response) + bonus, 'part': 1}\n"
        "def plain(response, problem, sample):\n    return problem.fields['worth']\n"
    )
    sets: dict[str, object] = {
        "a": {"path": "a", "reward": {"function": f"{tmp_path}/judge.py:score", "args": {"bonus": 0.25}}},
        "b": {"path": "b", "reward": {"function": f"{tmp_path}/judge.py:plain"}},
        "c": {"path": "c"},
    }
    message: list[str] = []

    async def rewarded(sets: dict[str, object], *requested: tuple[str, Problem]) -> tuple[set[str], list[Outcome]]:
        recipe = recipe_of().model_copy(update={"evaluation": EvaluationConfig.model_validate({"sets": sets})})
        async with contextlib.AsyncExitStack() as stack:
            rewards = await start_rewards(recipe, stack, report=message.append)
            return set(rewards), [await rewards[name]("1234", problem, Sample("p", "g", [1])) for name, problem in requested]

    problem, other = Problem("p", "x", "1", fields={"worth": 2}), Problem("q", "x", "1")
    names, outcomes = asyncio.run(rewarded(sets, ("a", problem), ("b", problem), ("b", other)))
    assert names == {UNNAMED, "a", "b"}
    assert [outcome.reward for outcome in outcomes] == [4.25, 2.0, 0.0]
    assert outcomes[0].parts == {"part": 1.0}
    assert len(message) == 1 and "judge.py:4: KeyError: 'worth'" in message[0]
    wrong: dict[str, object] = {"a": {"path": "a", "reward": {"function": f"{tmp_path}/judge.py:plain", "args": {"bonus": 1}}}}
    with pytest.raises(UserError, match=r"plain.* cannot be called"):
        asyncio.run(rewarded(wrong))


def test_lengths_include_all_samples_of_a_trajectory_and_rewards_count_once() -> None:
    """The agent rewrote its history once: the first sample has two more tokens than the last."""

    async def with_earlier(response: str, problem: Problem, sample: Sample) -> float:
        first = Sample(sample.prompt_id, sample.group_id, [1])
        first.append([2, 2, 2], [-1.0] * 3, 7)
        sample.earlier = [first]
        return 1.0

    metrics, _ = measured(recipe_of(), {"": [Problem("p", "x", "0")]}, rewards={UNNAMED: with_earlier}, version=0)
    assert (metrics["eval/length_mean"], metrics["eval/accuracy"], metrics["eval/mixed_fraction"]) == (2.0, 1.0, 1.0)
