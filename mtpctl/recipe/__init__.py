"""The recipe: its models, how it is loaded and checked, its errors. Importable without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mtpctl.recipe.errors import (
    ClusterResources,
    EnvironmentMissing,
    MtpctlError,
    RuntimeFailure,
    ThresholdMissed,
    UserError,
)

if TYPE_CHECKING:
    from mtpctl.recipe.loading import Loaded, dump_resolved, load_recipe
    from mtpctl.recipe.schema import Recipe

__all__ = [
    "ClusterResources",
    "EnvironmentMissing",
    "Loaded",
    "MtpctlError",
    "Recipe",
    "RuntimeFailure",
    "ThresholdMissed",
    "UserError",
    "dump_resolved",
    "load_recipe",
]


def __getattr__(name: str) -> Any:
    # Errors are imported everywhere, the leaves included; the models cost a quarter second and would close a circle.
    if name == "Recipe":
        from mtpctl.recipe.schema import Recipe

        return Recipe
    if name in ("Loaded", "dump_resolved", "load_recipe"):
        from mtpctl.recipe import loading

        return getattr(loading, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
