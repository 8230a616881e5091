"""The recipe: its models, how it is loaded and checked, its errors. Importable without torch."""

from __future__ import annotations

from importlib import import_module
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
    from mtpctl.recipe.cautions import cautions_of
    from mtpctl.recipe.checks import validate
    from mtpctl.recipe.loading import Loaded, dump_resolved, flatten, load_recipe
    from mtpctl.recipe.model_source import hf_config, model_folder, path_in_full
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
    "cautions_of",
    "dump_resolved",
    "flatten",
    "hf_config",
    "load_recipe",
    "model_folder",
    "path_in_full",
    "validate",
]

_HOMES = {
    "Recipe": "schema",
    "cautions_of": "cautions",
    "Loaded": "loading",
    "dump_resolved": "loading",
    "flatten": "loading",
    "load_recipe": "loading",
    "hf_config": "model_source",
    "model_folder": "model_source",
    "path_in_full": "model_source",
    "validate": "checks",
}


def __getattr__(name: str) -> Any:
    # Errors are imported everywhere, the leaves included; the models cost a quarter second and would close a circle.
    if name in _HOMES:
        return getattr(import_module(f"mtpctl.recipe.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
