"""The recipe: every key of a run, with its type, its default and a description.

Each section is one pydantic model, strict about unknown keys, importable without torch. The JSON schema and docs/recipe.md
print the descriptions, so they are written for whoever edits YAML.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from mtpctl.families.shape import ModelShape
from mtpctl.recipe.cluster import ClusterConfig
from mtpctl.recipe.data import DataConfig
from mtpctl.recipe.evaluation import EvaluationConfig
from mtpctl.recipe.model import ModelConfig, MtpConfig
from mtpctl.recipe.parallel import ParallelConfig
from mtpctl.recipe.reward import RewardConfig
from mtpctl.recipe.rollout import RolloutConfig, VllmConfig
from mtpctl.recipe.section import Complaints, NonNegativeFloat, NonNegativeInt, PositiveInt, Section
from mtpctl.recipe.sync import TRANSPORTS, NcclConfig, SyncConfig
from mtpctl.recipe.telemetry import TelemetryConfig
from mtpctl.recipe.train import Replay, TrainConfig

# The section `kernels`: which implementation computes log-probs and losses.


class KernelsConfig(Section):
    linear_logprob: Literal["auto", "reference", "chunked", "triton"] = Field(
        "auto", description="What computes log-probs and losses from hidden states; reference takes a second pass for the loss."
    )
    workspace_bytes: PositiveInt = Field(1 << 30, description="Bytes that log-prob kernels may use beside their inputs and outputs.")


# The section `logprob`: servers that compute old log-probs beside generation.


class LogprobConfig(Section):
    standalone: bool = Field(False, description="Compute old log-probs in servers, while generation goes on, and not in the trainer.")
    replicas: PositiveInt = Field(1, description="Log-prob servers.")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    max_restarts: NonNegativeInt = Field(3, description="Restarts of a replica within an hour before it is quarantined.")
    tokens_per_batch: PositiveInt = Field(16384, description="Packed tokens of a forward pass, at most.")
    queue_tokens: PositiveInt = Field(1 << 20, description="Tokens that may wait in the queue; beyond them callers have to wait.")
    keep_previous: bool = Field(False, description="Keep the weights of the version before, too; takes their memory a second time.")
    gpus: NonNegativeFloat = Field(1.0, description="GPUs of each rank; a fraction shares the card.")


# The section `async`: how far generation may run ahead of training.


class AsyncConfig(Section):
    staleness_threshold: NonNegativeFloat = Field(
        0.5, description="Samples that may be generated ahead, as a share of those that the updates until the next sync need; 0: none."
    )
    max_staleness: NonNegativeInt = Field(
        8,
        description="Greatest age of a token that is trained on, in versions behind the published one. Prompts of groups with older tokens "
        "are generated again, and the trainer waits for them.",
    )
    sync_every: PositiveInt = Field(1, description="Updates between weight syncs.")
    partial_rollout: bool = Field(
        True, description="Responses in flight at a sync continue under the new weights; false: the sync waits until they end."
    )
    deterministic: bool = Field(
        False, description="Same seed, same losses: nothing is generated ahead, batches are in prompt order, each request has its seed."
    )

    @property
    def staleness(self) -> float:
        """The threshold in effect: 0 in a deterministic run, at most `max_staleness`, beyond which samples would be too old to train on."""
        return 0.0 if self.deterministic else min(self.staleness_threshold, self.max_staleness)


NAMES = r"^[A-Za-z0-9._-]+$"
"""The names that a run can have."""


class Recipe(Section):
    """A whole run."""

    name: str = Field("run", pattern=NAMES, description="Name of the run.")
    seed: NonNegativeInt = Field(0, lt=1 << 63, description="Seed of every random draw.")
    run_dir: str = Field("runs/{name}", description="Directory that the run writes to; {name} and {seed} are filled in.")
    model: ModelConfig = Field(default_factory=ModelConfig)
    mtp: MtpConfig = Field(default_factory=MtpConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    rollout: RolloutConfig = Field(default_factory=VllmConfig)
    async_: AsyncConfig = Field(default_factory=AsyncConfig, alias="async")
    sync: SyncConfig = Field(default_factory=NcclConfig)
    logprob: LogprobConfig = Field(default_factory=LogprobConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    kernels: KernelsConfig = Field(default_factory=KernelsConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)

    @model_validator(mode="before")
    @classmethod
    def _default_variants(cls, data: object) -> object:
        """Fill in the default variant of a section that names none."""
        if not isinstance(data, dict):
            return data
        filled = dict(data)
        cluster = data.get("cluster")
        if isinstance(cluster, dict) and cluster.get("device") == "cpu":
            # The default transport follows the device.
            filled.setdefault("sync", {})
            if isinstance(filled["sync"], dict):
                filled["sync"] = {"transport": "shm", **filled["sync"]}
        for section, (key, default) in DEFAULT_VARIANTS.items():
            if isinstance(filled.get(section), dict):
                filled[section] = {key: default, **filled[section]}
        return filled

    @model_validator(mode="before")
    @classmethod
    def _older_keys(cls, data: object) -> object:
        """Take `data.checker` for `reward.function` where the latter is not given."""
        if not isinstance(data, dict) or not isinstance(data.get("data"), dict) or not isinstance(data.get("reward", {}), dict):
            return data
        checker = data["data"].get("checker")
        return data if checker is None else {**data, "reward": {"function": checker, **data.get("reward", {})}}

    @property
    def off_policy(self) -> bool:
        """Whether newer weights may train on a sample than sampled it: samples are generated ahead, or several updates share a sync."""
        return self.async_.staleness > 0 or self.async_.sync_every > 1

    @property
    def old_logprobs(self) -> Literal["recompute", "behaviour"]:
        """`train.rl.old_logprobs`, with `auto` resolved."""
        rl = self.train.rl
        if rl.old_logprobs != "auto":
            return rl.old_logprobs
        recomputes = self.logprob.standalone or rl.correction.mode != "off" or rl.loss == "decoupled"
        return "behaviour" if self.off_policy and not recomputes else "recompute"

    def replay(self, shape: ModelShape) -> Replay:
        """`train.moe.replay` for this model, with its default filled in; `off` for a model without experts."""
        if shape.moe is None or "rl" not in self.train.stages:
            return "off"
        if self.train.moe.replay is not None:
            return self.train.moe.replay
        if self.engine_gives_routes:
            return "rollout"
        return "recompute" if self.old_logprobs == "recompute" else "off"

    @property
    def engine_gives_routes(self) -> bool:
        """Whether the engine tells the experts of a token: vLLM, on a card with its prefix cache alone."""
        if not isinstance(self.rollout, VllmConfig):
            return False
        return self.device == "cpu" or bool(self.rollout.engine_args.get("enable_prefix_caching", True))

    @property
    def rewards(self) -> dict[str, RewardConfig]:
        """By their keys, the reward of the run and those that held-out sets have of their own."""
        own = {f"evaluation.sets.{name}.reward": each.reward for name, each in self.evaluation.sets.items() if each.reward is not None}
        return {"reward": self.reward, **own}

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """The device of the run: `cluster.device`, or with `auto` the device that the transport is for."""
        if self.cluster.device != "auto":
            return self.cluster.device
        return "cuda" if TRANSPORTS[self.sync.transport].cuda else "cpu"

    @property
    def run_path(self) -> Path:
        """The run directory, `{name}` and `{seed}` filled in."""
        return Path(self._filled(self.run_dir)).expanduser()

    @property
    def copy_url(self) -> str | None:
        """`train.checkpoint_copy`, `{name}` and `{seed}` filled in."""
        return None if self.train.checkpoint_copy is None else self._filled(self.train.checkpoint_copy)

    def _filled(self, text: str) -> str:
        return text.replace("{name}", self.name).replace("{seed}", str(self.seed))


DEFAULT_VARIANTS: dict[str, tuple[str, str]] = {"rollout": ("engine", "vllm"), "sync": ("transport", "nccl")}
"""Sections that have variants: the key that chooses one, and its default."""


def run_dir_fits(recipe: Recipe) -> Complaints:
    """Refuse a run directory with an unknown placeholder, and one that is a file."""
    if unknown := _unknown_placeholders(recipe.run_dir):
        yield f"run_dir: {unknown[0]} is not known; {{name}} and {{seed}} are filled in"
    elif recipe.run_path.exists() and not recipe.run_path.is_dir():
        yield f"run_dir: {recipe.run_path} is a file; name a folder"


def copy_fits(recipe: Recipe) -> Complaints:
    """Refuse a place for copies of checkpoints that is no URL, or has an unknown placeholder."""
    field, url = "train.checkpoint_copy", recipe.train.checkpoint_copy
    if url is None:
        return
    if unknown := _unknown_placeholders(url):
        yield f"{field}: {unknown[0]} is not known; {{name}} and {{seed}} are filled in"
    elif not re.fullmatch(r"[a-z][a-z0-9+.-]*://\S+", url):
        yield f"{field}: {url} is no URL; write s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or file:///FOLDER"


def _unknown_placeholders(text: str) -> list[str]:
    return re.findall(r"\{(?!name\}|seed\})[^}]*\}?", text)
