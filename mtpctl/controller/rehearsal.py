"""Trying the user's own code before anything starts, for commands that start nothing as well.

What only some recipes need is imported where they need it: most recipes name no code, and are checked in less than a second.
"""

from __future__ import annotations

from mtpctl.recipe.reward import VERIFIERS, reference_of
from mtpctl.recipe.schema import Recipe


def rehearse(recipe: Recipe) -> list[str]:
    """Try the code of the user's own that the recipe names: the loss on a few tokens, environment and reward on the first problems.

    Needs neither tokenizer nor model. Returns warnings. Raises UserError for the first thing that fails, with its file and line.
    """
    if "rl" not in recipe.train.stages:
        return []
    check_sandbox(recipe)
    try_loss(recipe)
    built_in = {field: config for field, config in recipe.rewards.items() if config.function in VERIFIERS}
    if any(config.args for config in built_in.values()):
        from mtpctl.rl.rewards.function import load_function

        for field, config in built_in.items():
            load_function(reference_of(config.function), config.args, field)
    if recipe.rollout.environment == "single" and len(built_in) == len(recipe.rewards):
        return []
    from mtpctl.controller.trial import TRIED, try_reward, try_set_rewards
    from mtpctl.data.prompts import chatted
    from mtpctl.data.sets import first_problems
    from mtpctl.rollout.environments import environment_of
    from mtpctl.rollout.trial import try_environment

    environment = environment_of(recipe.rollout)
    first = first_problems(recipe.data, recipe.seed, recipe.evaluation, TRIED)
    train = first["train"]
    if environment is not None:
        try_environment(environment, train, None, chat=chatted(recipe.data, train), deadline_s=recipe.rollout.deadline_s)
    warnings = [] if "reward" in built_in else [try_reward(recipe.reward, train)]
    try_set_rewards(recipe, {name: first[f"eval/{name}"] for name in recipe.evaluation.sets})
    if not train:
        warnings.append(f"{recipe.data.path} is not in the cache yet: your code was loaded, and is tried on rows when the run starts")
    return [warning for warning in warnings if warning]


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


def try_loss(recipe: Recipe) -> None:
    """Try the loss on a few tokens, where it is the user's own. Raises UserError, with its file and line where it is at fault."""
    if "rl" in recipe.train.stages and recipe.train.rl.own_loss:
        from mtpctl.rl.own_loss import check_loss  # which imports torch

        check_loss(recipe.train.rl)
