"""Trying the user's own code on three rows, for commands that start nothing."""

from __future__ import annotations

from mtpctl.data.sets import load_problem_sets
from mtpctl.recipe.schema import Recipe
from mtpctl.rollout.environments import environment_of
from mtpctl.rollout.trial import try_environment


def rehearse(recipe: Recipe) -> None:
    """Try the recipe's environment on the first problems, without tokenizer and model. Raises UserError for the first thing that fails."""
    environment = environment_of(recipe.rollout) if "rl" in recipe.train.stages else None
    if environment is not None:
        problems = load_problem_sets(recipe.data, recipe.seed).train
        try_environment(environment, problems, None, chat=recipe.data.chat_template)
