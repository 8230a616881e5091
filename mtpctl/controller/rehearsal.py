"""Trying the user's own code before anything starts."""

from __future__ import annotations

from mtpctl.recipe.schema import Recipe


def rehearse(recipe: Recipe) -> None:
    """Try the code of the user's own that the recipe names. Raises UserError for the first thing that fails, with its file and line."""
    try_loss(recipe)


def try_loss(recipe: Recipe) -> None:
    """Try the loss on a few tokens, where it is the user's own. Raises UserError, with its file and line where it is at fault."""
    if "rl" in recipe.train.stages and recipe.train.rl.own_loss:
        from mtpctl.rl.own_loss import check_loss  # which imports torch

        check_loss(recipe.train.rl)
