"""A recipe that fits its GPUs, or the error that it ends with."""

from __future__ import annotations

from mtpctl.families.shape import ModelShape
from mtpctl.plan.fitting import find_misfits
from mtpctl.recipe.schema import Recipe


def check_fits(recipe: Recipe, shape: ModelShape) -> None:
    """Raise the error of the first rank that does not fit."""
    for misfit in find_misfits(recipe, shape):
        raise misfit.error
