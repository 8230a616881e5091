"""The rewards of a run: the one that it trains on, and those of held-out sets that have one of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from mtpctl.data.sets import UNNAMED
from mtpctl.recipe.schema import Recipe
from mtpctl.rl.rewards.function import Reward
from mtpctl.rl.rewards.pool import Rewarder


async def start_rewards(
    recipe: Recipe, stack: contextlib.AsyncExitStack, *, tell: Callable[[str], None], log: Path | None = None
) -> Mapping[str, Reward]:
    """Start the reward of the recipe, under the name `UNNAMED`, and under their names those of held-out sets that name one.

    `stack` ends them. Arguments as of `Rewarder`. Raises UserError for a function that is missing or cannot be called.
    """
    configs = {UNNAMED: recipe.reward}
    for name, each in recipe.evaluation.sets.items():
        if each.reward is not None:
            configs[name] = each.reward
    return {name: await stack.enter_async_context(Rewarder(config, report=tell, log=log)) for name, config in configs.items()}
