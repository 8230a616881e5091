"""The recipe: its models, its errors. Importable without torch."""

from mtpctl.recipe.errors import (
    ClusterResources,
    EnvironmentMissing,
    MtpctlError,
    RuntimeFailure,
    ThresholdMissed,
    UserError,
)
from mtpctl.recipe.schema import Recipe

__all__ = ["ClusterResources", "EnvironmentMissing", "MtpctlError", "Recipe", "RuntimeFailure", "ThresholdMissed", "UserError"]
