"""The recipe's reward function, tried on rows of the data before anything starts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from mtpctl.data.problems import Problem
from mtpctl.data.sets import ProblemSets
from mtpctl.errors import UserError
from mtpctl.recipe.reward import FROM_ENVIRONMENT, VERIFIERS, RewardConfig
from mtpctl.recipe.schema import Recipe
from mtpctl.rl.rewards.function import Outcome
from mtpctl.rl.rewards.pool import Rewarder
from mtpctl.samples import Sample

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
