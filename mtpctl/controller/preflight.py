"""Preflight checks of user-defined code: loads or tries loss, agent, environment and rewards before anything starts.

Imports are local, because most recipes name no code and are checked in less than a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtpctl.data.problems import Problem
from mtpctl.data.sets import ProblemSets, first_problems
from mtpctl.errors import UserError
from mtpctl.recipe.reward import ANSWER_REWARDS, FROM_ENVIRONMENT, RewardConfig, code_reference
from mtpctl.recipe.schema import Recipe
from mtpctl.samples import Sample
from mtpctl.user_code import is_code_reference

if TYPE_CHECKING:
    from mtpctl.environments.trial import EnvironmentTrial
    from mtpctl.rl.rewards.function import Outcome

MAX_CHECKED_ROWS = 500
"""Maximum number of a set's own solutions on which a verifier (a function that only compares answers) is checked."""
TRIAL_ROWS = 3
"""Number of rows on which other reward functions are tried. Few, because a function may call a model or run a program."""
TRIAL_HINTS = 8
"""Number of rows for which a teacher's hint is rendered."""
_OTHER_VERIFIER = {"exact": "math", "math": "exact"}


@dataclass(frozen=True)
class CodeTrial:
    """The results of trying user-defined code. `environment`: None if the recipe has none."""

    environment: EnvironmentTrial | None = None
    warnings: tuple[str, ...] = ()


def try_code(recipe: Recipe, problems: ProblemSets, *, check_verifiers: bool) -> CodeTrial:
    """Try the user-defined code that RL calls: loss and advantage on a small example, environment and rewards on problems.

    `check_verifiers`: also check built-in verifiers, on many problems. Raises UserError for the first failure, with its file and line, and
    PrerequisiteMissing if there is no sandbox for code that the model writes.
    """
    if "rl" not in recipe.train.stages:
        return CodeTrial()
    check_sandbox(recipe)
    if is_code_reference(recipe.train.rl.loss) or is_code_reference(recipe.train.rl.advantage):
        from mtpctl.rl.user_objective import check_objective  # imports torch

        check_objective(recipe.rl)
    if recipe.rollout.agent is not None:
        from mtpctl.rl.rewards.function import AGENT, load_function

        load_function(recipe.rollout.agent, recipe.rollout.agent_args, AGENT)
    if recipe.rollout.verifiers is not None:
        from mtpctl.environments.trial import try_episodes

        try_episodes(recipe.rollout, problems.train)
    if (teacher := recipe.train.rl.teacher) is not None and teacher.hint is not None:
        from mtpctl.data.prompts import with_hint

        for problem in problems.train[:TRIAL_HINTS]:
            with_hint(problem, teacher.hint)
    environment = _try_environment(recipe, problems)
    warning = _try_rewards(recipe, problems, check_verifiers=check_verifiers)
    return CodeTrial(environment, (warning,) if warning else ())


def check_code(recipe: Recipe) -> list[str]:
    """Try the recipe's code on the first problems, without tokenizer and model. Returns warnings. Raises like `try_code`."""
    if "rl" not in recipe.train.stages:
        return []
    has_hint = recipe.train.rl.teacher is not None and recipe.train.rl.teacher.hint is not None
    custom_rewards = any(reward.function not in ANSWER_REWARDS for reward in recipe.rewards.values())
    needs_rows = has_hint or recipe.rollout.environment != "single" or custom_rewards
    if not needs_rows:
        return list(try_code(recipe, ProblemSets([], [], []), check_verifiers=False).warnings)
    first_rows = first_problems(recipe.data, recipe.seed, recipe.evaluation, TRIAL_ROWS, recipe.rollout)
    sets = {name: first_rows[f"eval/{name}"] for name in recipe.evaluation.sets}
    problems = ProblemSets(first_rows["train"], first_rows.get("eval", []), [], sets)
    warnings = list(try_code(recipe, problems, check_verifiers=False).warnings)
    if not first_rows["train"]:
        warnings.append(f"{recipe.data.path} is not in the cache yet: your code was loaded, and is tested on rows when the run starts")
    return warnings


def _try_environment(recipe: Recipe, problems: ProblemSets) -> EnvironmentTrial | None:
    if recipe.rollout.environment == "single" or recipe.rollout.verifiers is not None:
        return None
    from mtpctl.data.prompts import uses_chat_template
    from mtpctl.environments.environment import load_environment_class
    from mtpctl.environments.trial import try_environment

    environment = load_environment_class(recipe.rollout)
    assert environment is not None, "the recipe names one"
    uses_chat = uses_chat_template(recipe.data, problems.train)
    trial = try_environment(environment, problems.train, chat=uses_chat, deadline_s=recipe.rollout.deadline_s)
    for rows in problems.held_out.values():  # these may lack a column that the environment needs
        try:
            try_environment(environment, rows[:1], chat=uses_chat, deadline_s=recipe.rollout.deadline_s)
        except UserError as error:
            raise UserError(f"{error} (with the held-out row {rows[0].prompt_id})") from error
    if not trial.has_reward:
        for field, reward in recipe.rewards.items():
            if reward.function == FROM_ENVIRONMENT:
                raise UserError(
                    f"{field}.function: {recipe.rollout.environment} has no method `reward()`; add it, or name another function"
                )
    return trial


def _try_rewards(recipe: Recipe, problems: ProblemSets, *, check_verifiers: bool) -> str:
    built_in = {field: config for field, config in recipe.rewards.items() if config.function in ANSWER_REWARDS}
    if any(config.args for config in built_in.values()):
        from mtpctl.rl.rewards.function import Role, load_function

        for field, config in built_in.items():
            load_function(code_reference(config.function), config.args, Role.reward(field))
    if len(built_in) == len(recipe.rewards) and not check_verifiers:
        return ""
    if "reward" not in built_in:
        held_out = [rows[0] for name, rows in problems.held_out.items() if recipe.evaluation.of(name).reward is None]
        warning = try_reward(recipe.reward, problems.train, held_out=held_out)
    else:
        warning = check_verifier(recipe.reward, problems) if check_verifiers else ""
    return "; ".join(filter(None, [warning, *try_rewards_of_sets(recipe, problems.by_set_name)]))


def check_sandbox(recipe: Recipe) -> None:
    """Raise PrerequisiteMissing if the recipe runs code that the model writes, and this host has no sandbox for it."""
    sandboxed = {f"{field}.args": reward.args for field, reward in recipe.rewards.items() if reward.function == "code"}
    if recipe.rollout.environment == "python":
        sandboxed["rollout.environment_args"] = recipe.rollout.environment_args
    if not sandboxed:
        return
    from mtpctl.sandbox.sandbox import require

    for field, args in sandboxed.items():
        require(field, args.get("isolation", "required"))


def try_reward(config: RewardConfig, problems: list[Problem], field: str = "reward", *, held_out: Sequence[Problem] = ()) -> str:
    """Call the reward function on the solutions of the first problems. Returns a warning if all rewards are 0, else an empty string.

    `field`: the recipe section of the reward, for errors. `held_out`: problems of other sets that the function rewards, which may lack a
    column that it needs. Raises UserError if the function cannot be loaded or called, or fails.
    """
    if config.function == FROM_ENVIRONMENT:
        return ""  # no environment has run yet
    try:
        return asyncio.run(_check_outcomes(config, problems[:TRIAL_ROWS], held_out))
    except UserError as error:
        # Errors of reward processes always begin with the section `reward`.
        raise UserError(f"{field}{str(error).removeprefix('reward')}") from error


def try_rewards_of_sets(recipe: Recipe, sets: Mapping[str, list[Problem]]) -> list[str]:
    """Try the reward functions that only single held-out sets use, so that a mistake is reported before the first evaluation.

    Returns warnings; see `try_reward`.
    """
    warnings = []
    for name, set_config in recipe.evaluation.sets.items():
        if set_config.reward is not None and set_config.reward.function not in ANSWER_REWARDS:
            warnings.append(try_reward(set_config.reward, sets.get(name, []), f"evaluation.sets.{name}.reward"))
    return [warning for warning in warnings if warning]


def check_verifier(config: RewardConfig, problems: ProblemSets) -> str:
    """Check that a verifier accepts the problems' own solutions. Returns a warning, or an empty string.

    Raises UserError if it rejects every solution of a set, because then no response could be rewarded.
    """
    warnings = []
    sets = {"training": problems.train, "held-out": problems.evaluation}
    checked_rows = {name: rows[:: -(-len(rows) // MAX_CHECKED_ROWS)] for name, rows in sets.items() if rows}
    all_outcomes = iter(asyncio.run(_call_reward(config, [row for rows in checked_rows.values() for row in rows])))
    for name, rows in checked_rows.items():
        rejected_rows = [row for row, outcome in zip(rows, all_outcomes, strict=False) if not outcome.reward]
        if not rejected_rows:
            continue
        example, function = rejected_rows[0], config.function
        warning = (
            f"{example.prompt_id}: reward.function: {function} gives 0 for the row's own "
            f"{'answer' if example.solution is None else 'solution'} (answer {example.answer[-40:]!r}), and for {len(rejected_rows)} of "
            f"{len(rows)} checked {name} problems"
        )
        if len(rejected_rows) == len(rows):
            raise UserError(f"{warning}: no response could be correct; fix `answer`, or set reward.function: {_OTHER_VERIFIER[function]}")
        warnings.append(warning)
    return "; ".join(warnings)


async def _check_outcomes(config: RewardConfig, rows: list[Problem], held_out: Sequence[Problem]) -> str:
    outcomes = await _call_reward(config, [*rows, *held_out])
    for row, outcome in zip([*rows, *held_out], outcomes, strict=True):
        if outcome.error:
            if outcome.error.startswith("reward."):  # a built-in function reports its own key and fix
                raise UserError(outcome.error)
            fix = "raise reward.timeout_s, or make it faster" if outcome.timed_out else "fix it"
            raise UserError(f"reward.function: {outcome.error}, for {row.prompt_id} with the row's own solution as response; {fix}")
    rewards = {outcome.reward for outcome in outcomes[: len(rows)]}
    if len(rewards) == 1 and not any(rewards):
        return f"reward.function: {config.function} gives 0 for the solutions of the first {len(rows)} training problems themselves"
    return ""


async def _call_reward(config: RewardConfig, rows: list[Problem]) -> list[Outcome]:
    from mtpctl.rl.rewards.pool import Rewarder

    async with Rewarder(config) as rewarder:
        return await asyncio.gather(*(rewarder.attempt(row.target, row, _make_sample(row)) for row in rows))


def _make_sample(row: Problem) -> Sample:
    """A sample with the row's solution as response. Its tokens are bytes, because no tokenizer is loaded yet."""
    sample = Sample(row.prompt_id, "0", list(row.prompt.encode()))
    ids = list(row.target.encode())
    sample.append(ids, [-1.0] * len(ids), 0)
    sample.finish_reason = "stop"
    return sample
