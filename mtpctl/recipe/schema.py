"""The recipe: every key that a run can be given, with its type, its default and what it is for.

Each section is one pydantic model, strict about unknown keys, importable without torch. The descriptions are what
`mtpctl recipe show`, the JSON schema and the reference page print, so they are written for whoever edits YAML.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from mtpctl.recipe.asynchrony import AsyncConfig
from mtpctl.recipe.cluster import ClusterConfig
from mtpctl.recipe.data import DataConfig
from mtpctl.recipe.kernels import KernelsConfig
from mtpctl.recipe.logprob import LogprobConfig
from mtpctl.recipe.model import ModelConfig, MtpConfig
from mtpctl.recipe.rollout import RolloutConfig, VllmConfig
from mtpctl.recipe.section import NonNegativeInt, Section
from mtpctl.recipe.sync import NcclConfig, SyncConfig
from mtpctl.recipe.telemetry import TelemetryConfig
from mtpctl.recipe.train import TrainConfig


class Recipe(Section):
    """A whole run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9._-]+$", description="Name of the run.")
    seed: NonNegativeInt = Field(0, lt=1 << 63, description="Every random draw comes from it.")
    run_dir: str = Field("runs/{name}", description="Where everything of the run is written; {name} and {seed} are filled in.")
    model: ModelConfig = Field(default_factory=ModelConfig)
    mtp: MtpConfig = Field(default_factory=MtpConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    rollout: RolloutConfig = Field(default_factory=VllmConfig)
    async_: AsyncConfig = Field(default_factory=AsyncConfig, alias="async")
    sync: SyncConfig = Field(default_factory=NcclConfig)
    logprob: LogprobConfig = Field(default_factory=LogprobConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    kernels: KernelsConfig = Field(default_factory=KernelsConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)

    @model_validator(mode="before")
    @classmethod
    def _default_variants(cls, data: Any) -> Any:
        """A section with variants that names none is of the default one."""
        if not isinstance(data, dict):
            return data
        filled = dict(data)
        for section, (key, default) in DEFAULT_VARIANTS.items():
            if isinstance(filled.get(section), dict):
                filled[section] = {key: default, **filled[section]}
        return filled

    @property
    def off_policy(self) -> bool:
        """Whether a sample may be trained on by other weights than sampled it: some are let out ahead, or several updates share a sync."""
        return self.async_.staleness > 0 or self.async_.sync_every > 1

    @property
    def old_logprobs(self) -> Literal["recompute", "behaviour"]:
        """What `train.rl.old_logprobs` comes to in this recipe."""
        rl = self.train.rl
        if rl.old_logprobs != "auto":
            return rl.old_logprobs
        recomputes = self.logprob.standalone or rl.correction.mode != "off" or rl.loss == "decoupled"
        return "behaviour" if self.off_policy and not recomputes else "recompute"

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """What it is meant for: as `cluster.device` says, else as its transport says."""
        if self.cluster.device != "auto":
            return self.cluster.device
        return "cpu" if self.sync.transport == "shm" else "cuda"

    @property
    def run_path(self) -> Path:
        """The run directory, `{name}` and `{seed}` filled in."""
        return Path(self.run_dir.replace("{name}", self.name).replace("{seed}", str(self.seed))).expanduser()


DEFAULT_VARIANTS: dict[str, tuple[str, str]] = {"rollout": ("engine", "vllm"), "sync": ("transport", "nccl")}
"""Sections that come in variants: the key that tells them apart, and the one taken where it is not given."""
