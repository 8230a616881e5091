"""Trying the user's own code before anything starts: all of it in one place and one order, for a run and for commands that start nothing.

What only some recipes need is imported where they need it: most recipes name no code, and are checked in less than a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtpctl.data.problems import Problem
from mtpctl.data.sets import ProblemSets
from mtpctl.errors import UserError
from mtpctl.recipe.reward import FROM_ENVIRONMENT, VERIFIERS, RewardConfig, reference_of
from mtpctl.recipe.schema import Recipe
from mtpctl.rl.rewards.function import Outcome
from mtpctl.rl.rewards.pool import Rewarder
from mtpctl.samples import Sample
from mtpctl.user_code import is_reference

if TYPE_CHECKING:
    from mtpctl.data.sets import ProblemSets
    from mtpctl.environments.trial import EnvironmentTrial


TRIED_HINTS = 8
"""Rows into which a teacher's hint is filled."""


@dataclass(frozen=True)
class Tried:
    """What came of trying the user's code. `environment`: None where the recipe has none."""

    environment: EnvironmentTrial | None = None
    warnings: tuple[str, ...] = ()


def try_code(recipe: Recipe, problems: ProblemSets, *, compare: bool) -> Tried:
    """Try the user-defined code that RL calls: loss and advantage on a small example, environment and rewards on problems.

    `compare`: rewards that only compare answers are tried as well, on many problems. Raises UserError for the first thing that fails,
    with its file and line, and EnvironmentMissing where code that the model writes would have no sandbox.
    """
    if "rl" not in recipe.train.stages:
        return Tried()
    check_sandbox(recipe)
    if is_reference(recipe.train.rl.loss) or is_reference(recipe.train.rl.advantage):
        from mtpctl.rl.user_objective import check_objective  # imports torch

        check_objective(recipe.train.rl)
    if recipe.rollout.agent is not None:
        from mtpctl.rl.rewards.function import AGENT, load_function

        load_function(recipe.rollout.agent, recipe.rollout.agent_args, AGENT)
    if recipe.rollout.verifiers is not None:
        from mtpctl.environments.trial import try_episodes

        try_episodes(recipe.rollout, problems.train)
    if (teacher := recipe.train.rl.teacher) is not None and teacher.hint is not None:
        from mtpctl.data.prompts import hinted

        for problem in problems.train[:TRIED_HINTS]:
            hinted(problem, teacher.hint)
    environment = _try_environment(recipe, problems)
    return Tried(environment, tuple(filter(None, _try_rewards(recipe, problems, compare=compare))))


def rehearse(recipe: Recipe) -> list[str]:
    """Try the code of the user's own that the recipe names on the first problems. Needs neither tokenizer nor model.

    Returns warnings. Raises as `try_code`.
    """
    if "rl" not in recipe.train.stages:
        return []
    from mtpctl.data.sets import ProblemSets

    hint = recipe.train.rl.teacher is not None and recipe.train.rl.teacher.hint is not None
    needed = hint or recipe.rollout.environment != "single" or any(reward.function not in VERIFIERS for reward in recipe.rewards.values())
    if not needed:
        return list(try_code(recipe, ProblemSets([], [], []), compare=False).warnings)
    from mtpctl.data.sets import first_problems

    first = first_problems(recipe.data, recipe.seed, recipe.evaluation, TRIED, recipe.rollout)
    named = {name: first[f"eval/{name}"] for name in recipe.evaluation.sets}
    warnings = list(try_code(recipe, ProblemSets(first["train"], first.get("eval", []), [], named), compare=False).warnings)
    if not first["train"]:
        warnings.append(f"{recipe.data.path} is not in the cache yet: your code was loaded, and is tried on rows when the run starts")
    return warnings


def _try_environment(recipe: Recipe, problems: ProblemSets) -> EnvironmentTrial | None:
    if recipe.rollout.environment == "single" or recipe.rollout.verifiers is not None:
        return None
    from mtpctl.data.prompts import chatted
    from mtpctl.environments.environment import environment_of
    from mtpctl.environments.trial import try_environment

    environment = environment_of(recipe.rollout)
    assert environment is not None, "the recipe names one"
    chat = chatted(recipe.data, problems.train)
    trial = try_environment(environment, problems.train, chat=chat, deadline_s=recipe.rollout.deadline_s)
    for rows in problems.held_out.values():  # which may lack a column that it needs
        try:
            try_environment(environment, rows[:1], chat=chat, deadline_s=recipe.rollout.deadline_s)
        except UserError as error:
            raise UserError(f"{error} (with the held-out row {rows[0].prompt_id})") from error
    if not trial.rewards:
        for field, reward in recipe.rewards.items():
            if reward.function == FROM_ENVIRONMENT:
                raise UserError(
                    f"{field}.function: {recipe.rollout.environment} has no method `reward()`; write one, or name another function"
                )
    return trial


def _try_rewards(recipe: Recipe, problems: ProblemSets, *, compare: bool) -> list[str]:
    built_in = {field: config for field, config in recipe.rewards.items() if config.function in VERIFIERS}
    if any(config.args for config in built_in.values()):
        from mtpctl.rl.rewards.function import Role, load_function

        for field, config in built_in.items():
            load_function(reference_of(config.function), config.args, Role.reward(field))
    if len(built_in) == len(recipe.rewards) and not compare:
        return []

    if "reward" not in built_in:
        others = [rows[0] for name, rows in problems.held_out.items() if recipe.evaluation.of(name).reward is None]
        warning = try_reward(recipe.reward, problems.train, also=others)
    else:
        warning = compare_answers(recipe.reward, problems) if compare else ""
    try_set_rewards(recipe, problems.named)
    return [warning]


def check_sandbox(recipe: Recipe) -> None:
    """Raise EnvironmentMissing where the recipe runs code that the model writes, and this host has no sandbox for it."""
    asked = {f"{field}.args": reward.args for field, reward in recipe.rewards.items() if reward.function == "code"}
    if recipe.rollout.environment == "python":
        asked["rollout.environment_args"] = recipe.rollout.environment_args
    if not asked:
        return
    from mtpctl.sandbox.shared import require

    for field, args in asked.items():
        require(field, args.get("isolation", "required"))


# The recipe's reward function, tried on rows of the data before anything starts.

MAX_CHECKED = 500
"""Of the problems of a set, at most so many have their own solutions checked by a function that only compares answers."""

TRIED = 3
"""Rows on which any other function is tried: it may call a model, or run a program."""

_OTHER = {"exact": "math", "math": "exact"}


def compare_answers(config: RewardConfig, problems: ProblemSets) -> str:
    """Reward some problems' own solutions by a function that only compares answers. Returns a warning, empty without one.

    Raises UserError where it accepts no solution of a set: no response could be rewarded.
    """
    return asyncio.run(_compared(config, {"training": problems.train, "held-out": problems.evaluation}))


def try_reward(config: RewardConfig, problems: list[Problem], field: str = "reward", *, also: Sequence[Problem] = ()) -> str:
    """Reward the own solutions of the first problems. Returns a warning where none is worth anything, empty otherwise.

    `also`: problems of other sets that the function rewards, which may lack a column that it needs. Raises UserError that begins with a
    key of the section `field`, for a function that cannot be loaded or called, or that fails.
    """
    if config.function == FROM_ENVIRONMENT:
        return ""  # no environment has run yet
    try:
        return asyncio.run(_tried(config, problems[:TRIED], also))
    except UserError as error:
        # Processes that load and call the function know it as the one of the section `reward`.
        raise UserError(f"{field}{str(error).removeprefix('reward')}") from error


def try_set_rewards(recipe: Recipe, named: Mapping[str, list[Problem]]) -> None:
    """Try the rewards that held-out sets have of their own, so that a mistake in one does not show at the first evaluation."""
    for name, each in recipe.evaluation.sets.items():
        if each.reward is not None and each.reward.function not in VERIFIERS:
            try_reward(each.reward, named.get(name, []), f"evaluation.sets.{name}.reward")


async def _compared(config: RewardConfig, named: dict[str, list[Problem]]) -> str:
    warnings = []
    looked_at_in = {what: those[:: -(-len(those) // MAX_CHECKED)] for what, those in named.items() if those}
    all_outcomes = iter(await _rewarded(config, [row for rows in looked_at_in.values() for row in rows]))
    for what, looked_at in looked_at_in.items():
        outcomes = [next(all_outcomes) for _ in looked_at]
        wrong = [each for each, outcome in zip(looked_at, outcomes, strict=True) if not outcome.reward]
        if not wrong:
            continue
        first, kind = wrong[0], config.function
        warning = (
            f"{first.prompt_id}: reward.function: {kind} gives 0 for the row's own {'answer' if first.solution is None else 'solution'} "
            f"(answer {first.answer[-40:]!r}), as for {len(wrong)} of {len(looked_at)} {what} problems looked at"
        )
        if len(wrong) == len(looked_at):
            raise UserError(f"{warning}: no response could be right; fix `answer`, or set reward.function: {_OTHER[kind]}")
        warnings.append(warning)
    return "; ".join(warnings)


async def _tried(config: RewardConfig, rows: list[Problem], also: Sequence[Problem]) -> str:
    outcomes = await _rewarded(config, [*rows, *also])
    for row, outcome in zip([*rows, *also], outcomes, strict=True):
        if outcome.error:
            if outcome.error.startswith("reward."):  # told by one of ours, with its key and mend
                raise UserError(outcome.error)
            mend = "raise reward.timeout_s, or make it faster" if outcome.timed_out else "fix it"
            raise UserError(f"reward.function: {outcome.error}, for {row.prompt_id} with the row's own solution as response; {mend}")
    rewards = {outcome.reward for outcome in outcomes[: len(rows)]}
    if len(rewards) == 1 and not any(rewards):
        return f"reward.function: {config.function} gives 0 for the own solutions of the first {len(rows)} training problems"
    return ""


async def _rewarded(config: RewardConfig, rows: list[Problem]) -> list[Outcome]:
    async with Rewarder(config) as rewarder:
        return await asyncio.gather(*(rewarder.attempt(row.target, row, _sample(row)) for row in rows))


def _sample(row: Problem) -> Sample:
    """A sample as if the row's solution had been generated: its bytes for tokens, since no tokenizer is loaded yet."""
    sample = Sample(row.prompt_id, "0", list(row.prompt.encode()))
    ids = list(row.target.encode())
    sample.append(ids, [-1.0] * len(ids), 0)
    sample.finish_reason = "stop"
    return sample
