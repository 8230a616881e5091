"""The section `telemetry`: where metrics go besides the run directory."""

from __future__ import annotations

from pydantic import Field

from mtpctl.recipe.section import NonNegativeInt, Section


class TelemetryConfig(Section):
    tensorboard: bool = Field(True, description="Write `tensorboard/` in the run directory.")
    wandb: str | None = Field(None, description="Weights & Biases project, where that package is installed.")
    mlflow: str | None = Field(
        None, description="MLflow experiment, where that package is installed; MLFLOW_TRACKING_URI says where it is kept."
    )
    group: str | None = Field(None, description="Group of the run in Weights & Biases, and the tag `mtpctl.group` in MLflow.")
    tags: list[str] = Field([], description="Tags of the run there.")
    samples: NonNegativeInt = Field(
        8, description="Responses to keep as text in `samples/` at each update and for each held-out set at each evaluation; 0: none."
    )
    profile: bool = Field(False, description="Profile the third update of each stage: trace and tables in `logs/` of the run directory.")
