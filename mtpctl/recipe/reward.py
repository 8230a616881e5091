"""The section `reward`: the reward function, and how it is run."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from mtpctl.recipe.section import Complaints, PositiveFloat, PositiveInt, Section
from mtpctl.user_code import is_code_reference, missing_file

if TYPE_CHECKING:
    from mtpctl.recipe.schema import Recipe

FROM_ENVIRONMENT = "environment"
"""The reward function that returns the result of the environment's own `reward()`."""

BUILT_IN = {
    "exact": "mtpctl.rl.rewards.built_in:exact",
    "math": "mtpctl.rl.rewards.math:score",
    "length": "mtpctl.rl.rewards.built_in:length",
    "llm_judge": "mtpctl.rl.rewards.built_in:llm_judge",
    "code": "mtpctl.sandbox.reward:score",
    FROM_ENVIRONMENT: "mtpctl.environments.built_in:environment_reward",
}
"""Built-in functions by their names in a recipe, as `MODULE:NAME`. They have the signature of user-defined functions."""

ANSWER_REWARDS = ("exact", "math")
"""Functions that only compare the final answer, so they must accept a row's own solution."""

TIME_LIMIT_ARGS = {"code": "timeout_s", "math": "seconds"}
"""The argument by which a built-in function limits its own time. Exceeding it is a wrong answer, not a failed call."""
DEFAULT_TIME_LIMIT_S = 5.0
"""Default of these arguments."""


class RewardConfig(Section):
    function: str = Field(
        "exact",
        min_length=1,
        description=f"Reward function: a user-defined one, FILE.py:NAME or MODULE:NAME, or one of {', '.join(BUILT_IN)}.",
    )
    args: dict[str, object] = Field({}, description="Keyword arguments in addition to response, problem and sample.")
    workers: PositiveInt | None = Field(
        None,
        description="Plain function: number of worker processes; default: one per CPU, at most 16, and more if calls only wait. Coroutine: "
        "number of concurrent calls; default: 256.",
    )
    timeout_s: PositiveFloat = Field(30.0, description="Timeout of a call in seconds, without the wait for a free process.")
    on_error: Literal["zero", "drop", "stop"] = Field(
        "zero",
        description="Reaction to a call that raises, times out or returns no number. zero: the reward is 0; drop: the group is dropped; "
        "stop: the run ends.",
    )


def code_reference(function: str) -> str:
    """The function that a recipe names, as `FILE.py:NAME` or `MODULE:NAME`."""
    return BUILT_IN.get(function, function)


def check_reward(reward: RewardConfig, checker: str | None) -> Complaints:
    """Report a missing function, and one that contradicts the older key `data.checker`."""
    if checker is not None and checker != reward.function:
        yield f"data.checker: {checker} is the older key for reward.function, which is {reward.function}; remove data.checker"
    yield from check_function(reward, "reward")


def check_function(reward: RewardConfig, section: str) -> Complaints:
    """Report an unknown or missing function, and one whose own time limit is not below `timeout_s`. `section`: the key of `reward`."""
    function, field = reward.function, f"{section}.function"
    if function in BUILT_IN:
        if function in TIME_LIMIT_ARGS:
            argument = TIME_LIMIT_ARGS[function]
            seconds = reward.args.get(argument, DEFAULT_TIME_LIMIT_S)
            if isinstance(seconds, int | float) and seconds >= reward.timeout_s:
                yield f"{section}.timeout_s: must be more than {section}.args.{argument}: {seconds:g}, got {reward.timeout_s:g}"
        return
    if is_code_reference(function):
        if reason := missing_file(function):
            yield f"{field}: {reason}"
        return
    if function.endswith(".py"):
        yield f"{field}: {function} is a file; name the function in it, as {function}:score"
        return
    matches = difflib.get_close_matches(function, BUILT_IN, 1)
    hint = (
        f"did you mean {matches[0]}?" if matches else f"built in are {', '.join(BUILT_IN)}; write your own as FILE.py:NAME or MODULE:NAME"
    )
    yield f"{field}: {function!r} is not built in; {hint}"


def _compared_function(reward: RewardConfig) -> str:
    """The function that rewards the answer: that of the argument `of` for `length`, which only subtracts a penalty."""
    return str(reward.args.get("of", "exact")) if reward.function == "length" else reward.function


def check_answers(recipe: Recipe) -> Complaints:
    """Report rewards that the environment does not compute, and answers or solutions that the data do not have.

    A reward that compares answers must have them: a row without an answer has an empty one, so an empty response would be correct.
    """
    data, function, environment = recipe.data, _compared_function(recipe.reward), recipe.rollout.environment
    if function == FROM_ENVIRONMENT and environment == "single" and not recipe.rollout.uses_agents and "rl" in recipe.train.stages:
        yield "reward.function: environment uses reward() of rollout.environment, but single has none; name an environment with reward()"
    if recipe.rollout.verifiers and recipe.rollout.environment_eval_args and (data.path is not None or data.task is not None):
        yield (
            "rollout.environment_eval_args: apply to held-out tasks of the environment itself, but the problems are those of data; "
            "leave them out, or set data.path and data.task to null"
        )
    if recipe.rollout.verifiers is not None and data.path is None and data.task is None:
        if function in ANSWER_REWARDS and "rl" in recipe.train.stages:
            yield (
                f"reward.function: {function} has no answer to compare with, and {environment} rewards its own tasks; "
                "set reward.function: environment"
            )
        if "sft" in recipe.train.stages and data.sft_path is None and data.sft_task is None:
            yield f"data.sft_path: tasks of {environment} have no solutions; name rows for the supervised stage, or set stages: [rl]"
    if data.columns.answer is None and function in ANSWER_REWARDS and "rl" in recipe.train.stages:
        yield f"data.columns.answer: the reward {function} needs an answer to compare with, got null; name the column"
    for name, config in recipe.evaluation.sets.items():
        columns, reward = config.columns or data.columns, _compared_function(config.reward) if config.reward else function
        if columns.answer is None and reward in ANSWER_REWARDS:
            yield (
                f"evaluation.sets.{name}.columns.answer: the reward {reward} needs an answer to compare with, got null; name the column, "
                f"or set evaluation.sets.{name}.reward.function"
            )
