"""The rewards of held-out sets that have one of their own."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Literal, cast

from mtpctl.data.problems import Problem
from mtpctl.errors import RuntimeFailure, UserError
from mtpctl.recipe.evaluation import CHECKERS, EvaluationConfig, SetRewardConfig
from mtpctl.rl.rewards import Checker, make_checker
from mtpctl.samples import Sample
from mtpctl.user_code import check_call, describe_error, load

Score = Callable[[str, Problem, Sample], Awaitable[float]]
"""The reward of a response, from its text, its problem and its sample."""


def rewards_of(evaluation: EvaluationConfig) -> dict[str, Score]:
    """The rewards of the sets that name one, by the sets' names. Raises UserError for a function that is missing or cannot be called."""
    return {
        name: _own(each.reward, f"evaluation.sets.{name}.reward.function")
        for name, each in evaluation.sets.items()
        if each.reward is not None
    }


def by_answer(checker: Checker) -> Score:
    """The reward of a checker, which compares the response with the problem's answer, in a thread, since it may take seconds."""

    async def score(response: str, problem: Problem, sample: Sample) -> float:
        return await asyncio.to_thread(checker, response, problem.answer)

    return score


def _own(reward: SetRewardConfig, field: str) -> Score:
    if reward.function in CHECKERS:
        return by_answer(make_checker(cast(Literal["exact", "math"], reward.function)))
    function = load(reward.function, field)
    if not callable(function):
        raise UserError(f"{field}: {reward.function} is no function")
    check_call(function, ("response", "problem", "sample"), reward.args, field)

    async def score(response: str, problem: Problem, sample: Sample) -> float:
        try:
            if inspect.iscoroutinefunction(function):
                value = await function(response, problem, sample, **reward.args)
            else:
                value = await asyncio.to_thread(function, response, problem, sample, **reward.args)
            return float(value["reward"] if isinstance(value, dict) else value)
        except Exception as error:
            raise RuntimeFailure(f"{field}: {problem.prompt_id}: {describe_error(error, reward.function)}") from error

    return score
