"""Trying the user's own code before anything starts, for commands that start nothing as well.

What only some recipes need is imported where they need it: most recipes name no code, and are checked in less than a second.
"""

from __future__ import annotations

from mtpctl.data.sets import load_problem_sets
from mtpctl.recipe.reward import VERIFIERS
from mtpctl.recipe.schema import Recipe


def rehearse(recipe: Recipe) -> list[str]:
    """Try the code of the user's own that the recipe names: the loss on a few tokens, environment and reward on the first problems.

    Needs neither tokenizer nor model. Returns warnings. Raises UserError for the first thing that fails, with its file and line.
    """
    if "rl" not in recipe.train.stages:
        return []
    check_sandbox(recipe)
    try_loss(recipe)
    with_environment, own_reward = recipe.rollout.environment != "single", recipe.reward.function not in VERIFIERS
    if not with_environment and not own_reward:
        return []
    from mtpctl.rollout.environments import environment_of

    environment = environment_of(recipe.rollout)
    problems = load_problem_sets(recipe.data, recipe.seed)
    if environment is not None:
        from mtpctl.data.prompts import chatted
        from mtpctl.rollout.trial import try_environment

        try_environment(environment, problems.train, None, chat=chatted(recipe.data, problems.train))
    if not own_reward:
        return []
    from mtpctl.controller.trial import check_rewards

    warning = check_rewards(problems, recipe)
    return [warning] if warning else []


def check_sandbox(recipe: Recipe) -> None:
    """Raise EnvironmentMissing where the recipe runs code that the model writes, and this host has no sandbox for it."""
    rewards = {"reward": recipe.reward}
    rewards |= {f"evaluation.sets.{name}.reward": each.reward for name, each in recipe.evaluation.sets.items() if each.reward}
    asked = {f"{field}.args": reward.args for field, reward in rewards.items() if reward.function == "code"}
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
