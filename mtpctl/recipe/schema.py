"""The recipe, and its sections `async`, `logprob`, `kernels`, `cluster` and `telemetry`.

Each section is a pydantic model that rejects unknown keys. No module here imports torch. The descriptions appear in the JSON schema and in
docs/recipe.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from mtpctl.families.shape import ModelShape
from mtpctl.recipe.data import DataConfig, EvaluationConfig
from mtpctl.recipe.model import ModelConfig, MtpConfig
from mtpctl.recipe.numerics import Numerics
from mtpctl.recipe.reward import RewardConfig
from mtpctl.recipe.rl import RlConfig, TeacherConfig
from mtpctl.recipe.rollout import RolloutConfig, VllmConfig
from mtpctl.recipe.section import Complaints, NonNegativeFloat, NonNegativeInt, ParallelConfig, PositiveFloat, PositiveInt, Section
from mtpctl.recipe.sync import TRANSPORTS, NcclConfig, StorageConfig, SyncConfig
from mtpctl.recipe.train import Replay, TrainConfig


class AsyncConfig(Section):
    """The section `async`: how far generation may run ahead of training."""

    staleness_threshold: NonNegativeFloat = Field(
        0.5, description="Samples generated ahead of training, as a fraction of those trained between two syncs."
    )
    max_staleness: NonNegativeInt = Field(
        8,
        description="Maximum age of a trained token, in weight versions. Groups with older tokens are generated again, and the trainer "
        "waits for them.",
    )
    sync_every: PositiveInt = Field(1, description="Updates between weight syncs.")
    partial_rollout: bool = Field(
        True, description="Responses in flight at a sync continue under new weights; false: the sync waits for them."
    )
    deterministic: bool = Field(False, description="Same seed, same losses: nothing is generated ahead, and batches are in prompt order.")

    @property
    def staleness(self) -> float:
        """The effective threshold: 0 in a deterministic run, at most `max_staleness`."""
        return 0.0 if self.deterministic else min(self.staleness_threshold, self.max_staleness)


class LogprobConfig(Section):
    """The section `logprob`: servers that compute old log-probs during generation."""

    standalone: bool = Field(False, description="Compute old log-probs in servers during generation instead of in the trainer.")
    replicas: PositiveInt = Field(1, description="Log-prob servers.")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    max_restarts: NonNegativeInt = Field(3, description="Restarts of a replica within an hour before it is quarantined.")
    tokens_per_batch: PositiveInt = Field(16384, description="Maximum packed tokens in a forward pass.")
    queue_tokens: PositiveInt = Field(1 << 20, description="Maximum tokens in the queue; further callers wait.")
    keep_previous: bool = Field(False, description="Also keep the weights of the previous version, which doubles their memory.")
    gpus: NonNegativeFloat = Field(1.0, description="GPUs per rank; a fraction shares the GPU.")


class KernelsConfig(Section):
    """The section `kernels`: the implementation that computes log-probs and losses."""

    linear_logprob: Literal["auto", "reference", "chunked", "triton"] = Field(
        "auto", description="Kernel that computes log-probs and losses from hidden states; reference makes a second pass for the loss."
    )
    workspace_bytes: PositiveInt = Field(1 << 30, description="Workspace of log-prob kernels in bytes, without inputs and outputs.")


RAY_ADDRESS = re.compile(r"auto|local|(?:\w+://)?\S+:[0-9]+\S*")


class ClusterConfig(Section):
    """The section `cluster`: the Ray cluster of a run, its devices and deadlines."""

    address: str | None = Field(None, description="Ray cluster to join; default: start one on this machine.")
    num_cpus: PositiveInt | None = Field(None, description="CPUs of the local cluster; default: this machine's.")
    num_gpus: NonNegativeInt | None = Field(None, description="GPUs of the local cluster; default: this machine's.")
    gpus_per_node: PositiveInt = Field(8, description="GPUs per host, for the placement plan.")
    gpu_gib: PositiveFloat | None = Field(None, description="GPU memory in GiB, for the memory plan; default: detected on this machine.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cpu with sync.transport: shm, else cuda.")
    interface: str | None = Field(
        None,
        description="Network interface of NCCL and gloo, such as bond0. Default: the loopback on one host; with cluster.address, the "
        "interface of the host's address for gloo, and NCCL's choice for NCCL.",
    )
    actor_deadline_s: PositiveFloat = Field(
        900.0, description="Timeout for the start of an actor, in seconds. The first start of an engine compiles kernels."
    )
    step_deadline_s: PositiveFloat = Field(1800.0, description="Timeout in seconds of a trainer call, and of a batch without responses.")


LOOPBACK = "127.0.0.1"
HTTP_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[0-9a-fA-F:.]+)\]|(?P<host>[^\s:\[\]]*)):(?P<port>\d{1,5})")


def _with_default_host(value: object) -> object:
    """A port alone binds to the loopback address, which other machines cannot reach."""
    return f"{LOOPBACK}:{value}" if isinstance(value, int) and not isinstance(value, bool) else value


def _http_address(text: str) -> str:
    match = HTTP_ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise ValueError(f"must be HOST:PORT, such as {LOOPBACK}:9090, got {text!r}")
    return text if match["ipv6"] or match["host"] else f"{LOOPBACK}{text}"


HttpAddress = Annotated[str, BeforeValidator(_with_default_host), AfterValidator(_http_address)]
"""`HOST:PORT`; a port alone binds to the loopback address."""


class TelemetryConfig(Section):
    """The section `telemetry`: destinations of metrics in addition to the run directory."""

    tensorboard: bool = Field(True, description="Write `tensorboard/` in the run directory.")
    wandb: str | None = Field(None, description="Weights & Biases project; needs the package wandb.")
    mlflow: str | None = Field(None, description="MLflow experiment; needs the package mlflow. MLFLOW_TRACKING_URI names the server.")
    group: str | None = Field(None, description="Group of the run in Weights & Biases, and the tag `mtpctl.group` in MLflow.")
    tags: list[str] = Field([], description="Tags of the run in Weights & Biases and MLflow.")
    http: HttpAddress | None = Field(
        None,
        description="HOST:PORT of the status page, /status.json, and /metrics for Prometheus; a port alone binds to 127.0.0.1, and port 0 "
        "to any free port.",
    )
    samples: NonNegativeInt = Field(8, description="Responses stored in `samples/` at each update, and for each held-out set; 0: none.")
    profile: bool = Field(False, description="Profile the third update of each stage; traces and tables are written to `logs/`.")

    @property
    def http_address(self) -> tuple[str, int] | None:
        """Host and port of the status page; None if there is none."""
        match = None if self.http is None else HTTP_ADDRESS.fullmatch(self.http)
        return None if match is None else (match["ipv6"] or match["host"], int(match["port"]))


NAME_PATTERN = r"^[A-Za-z0-9._-]+$"
"""Pattern of a run's name."""


class Recipe(Section):
    """A whole run."""

    name: str = Field("run", pattern=NAME_PATTERN, description="Name of the run.")
    seed: NonNegativeInt = Field(0, lt=1 << 63, description="Random seed of the whole run.")
    run_dir: str = Field("runs/{name}", description="Directory that the run writes to; {name} and {seed} are replaced.")
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
    numerics: Numerics = Field(
        "default",
        description="bitwise: engine, log-prob server and trainer compute the same log-probs to the last bit, at a cost in speed. Needs "
        "fp32 on a CPU or bf16 on a GPU, and a supported model.",
    )
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)

    @model_validator(mode="before")
    @classmethod
    def _default_variants(cls, data: object) -> object:
        """Select the default variant of sections that name none."""
        if not isinstance(data, dict):
            return data
        sections = dict(data)
        cluster = data.get("cluster")
        if isinstance(cluster, dict) and cluster.get("device") == "cpu":
            # The default transport follows the device.
            sections.setdefault("sync", {})
            if isinstance(sections["sync"], dict):
                sections["sync"] = {"transport": "shm", **sections["sync"]}
        for section, (key, default) in DEFAULT_VARIANTS.items():
            if isinstance(sections.get(section), dict):
                sections[section] = {key: default, **sections[section]}
        return sections

    @model_validator(mode="before")
    @classmethod
    def _replace_deprecated_keys(cls, data: object) -> object:
        """Use `data.checker` as `reward.function` if the latter is not set."""
        if not isinstance(data, dict) or not isinstance(data.get("data"), dict) or not isinstance(data.get("reward", {}), dict):
            return data
        checker = data["data"].get("checker")
        return data if checker is None else {**data, "reward": {"function": checker, **data.get("reward", {})}}

    @property
    def off_policy(self) -> bool:
        """Whether the policy may have been updated between the generation of a sample and the update that trains on it."""
        return self.async_.staleness > 0 or self.async_.sync_every > 1

    @property
    def rl(self) -> RlConfig:
        """`train.rl`, with `correction.mode: auto` resolved."""
        rl = self.train.rl
        if rl.correction.mode != "auto":
            return rl
        mode = "truncate" if self.rollout.quantization == "fp8" and rl.old_logprobs != "behaviour" else "off"
        return rl.model_copy(update={"correction": rl.correction.model_copy(update={"mode": mode})})

    @property
    def old_logprobs(self) -> Literal["recompute", "behaviour"]:
        """`train.rl.old_logprobs`, with `auto` resolved."""
        rl = self.rl
        if rl.old_logprobs != "auto":
            return rl.old_logprobs
        recomputes = self.logprob.standalone or rl.correction.mode != "off" or rl.loss == "decoupled"
        return "behaviour" if self.off_policy and not recomputes else "recompute"

    @property
    def runs_logprob_server(self) -> bool:
        """Whether the run starts a log-prob server of the policy."""
        return self.logprob.standalone and "rl" in self.train.stages

    @property
    def served_teacher(self) -> TeacherConfig | None:
        """The teacher that the run serves; None without one, or if another server or the policy is the teacher."""
        teacher = self.train.rl.teacher
        return teacher if teacher is not None and teacher.runs_server and "rl" in self.train.stages else None

    def for_teacher_server(self) -> Recipe:
        """The recipe of the log-prob server of `served_teacher`: its layout, without MTP layers, which such a server does not need."""
        teacher = self.served_teacher
        assert teacher is not None
        update = {"replicas": teacher.replicas, "parallel": teacher.parallel, "gpus": teacher.gpus, "keep_previous": False}
        return self.model_copy(
            update={
                "logprob": self.logprob.model_copy(update=update),
                "mtp": MtpConfig(mode="off"),
                "train": self.train.model_copy(update={"lora": None}),
            }
        )

    def replay(self, shape: ModelShape) -> Replay:
        """`train.moe.replay` for this model, with its default resolved; `off` for a dense model, or without the RL stage."""
        if shape.moe is None or "rl" not in self.train.stages:
            return "off"
        if self.train.moe.replay is not None:
            return self.train.moe.replay
        if self.engine_returns_routes:
            return "rollout"
        return "recompute" if self.old_logprobs == "recompute" else "off"

    @property
    def engine_returns_routes(self) -> bool:
        """Whether the engine returns the experts of each token. vLLM does; on a GPU only if prefix caching is on."""
        if not self.rollout.traits.routes:
            return False
        return self.device == "cpu" or bool(self.rollout.engine_args.get("enable_prefix_caching", True))

    @property
    def rewards(self) -> dict[str, RewardConfig]:
        """The reward of the run and the rewards of held-out sets that have their own, by recipe key."""
        set_rewards = {
            f"evaluation.sets.{name}.reward": held_out.reward
            for name, held_out in self.evaluation.sets.items()
            if held_out.reward is not None
        }
        return {"reward": self.reward, **set_rewards}

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """The device of the run: `cluster.device`; if `auto`, cuda for the transports nccl and ipc, and cpu for shm and storage."""
        if self.cluster.device != "auto":
            return self.cluster.device
        return "cuda" if TRANSPORTS[self.sync.transport].cuda else "cpu"

    @property
    def run_path(self) -> Path:
        """`run_dir` with `{name}` and `{seed}` replaced."""
        return Path(self._fill_placeholders(self.run_dir)).expanduser()

    @property
    def sync_url(self) -> str | None:
        """`sync.url` with `{name}` and `{seed}` replaced; None for transports without a URL."""
        url = self.sync.url if isinstance(self.sync, StorageConfig) else None
        return None if url is None else self._fill_placeholders(url)

    @property
    def copy_url(self) -> str | None:
        """`train.checkpoint_copy` with `{name}` and `{seed}` replaced."""
        return None if self.train.checkpoint_copy is None else self._fill_placeholders(self.train.checkpoint_copy)

    @property
    def sent_precision(self) -> str:
        """The precision of the weights that a sync sends, which is that of the engines."""
        return self.train.precision if self.rollout.dtype == "auto" else self.rollout.dtype

    def _fill_placeholders(self, text: str) -> str:
        return text.replace("{name}", self.name).replace("{seed}", str(self.seed))


DEFAULT_VARIANTS: dict[str, tuple[str, str]] = {"rollout": ("engine", "vllm"), "sync": ("transport", "nccl")}
"""Sections with variants: the key that selects one, and its default."""


def check_address(cluster: ClusterConfig) -> Complaints:
    """Report an address that Ray cannot parse."""
    address = cluster.address
    if address is not None and not RAY_ADDRESS.fullmatch(address):
        yield f"cluster.address: {address} is not the address of a Ray cluster; write HOST:PORT, ray://HOST:PORT, or auto"


def check_run_dir(recipe: Recipe) -> Complaints:
    """Report a run directory that is a file, or has an unknown placeholder."""
    if unknown := _unknown_placeholders(recipe.run_dir):
        yield f"run_dir: {unknown[0]} is not a placeholder; only {{name}} and {{seed}} are replaced"
    elif recipe.run_path.exists() and not recipe.run_path.is_dir():
        yield f"run_dir: {recipe.run_path} is a file; name a folder"


def check_urls(recipe: Recipe) -> Complaints:
    """Report a `train.checkpoint_copy` or `sync.url` that is not a URL, or has an unknown placeholder."""
    if recipe.train.checkpoint_copy is not None:
        yield from _check_url("train.checkpoint_copy", recipe.train.checkpoint_copy)
    if isinstance(recipe.sync, StorageConfig):
        if recipe.sync.url is None:
            yield "sync.url: the transport storage needs a folder; write s3://BUCKET/FOLDER, or set sync.transport: nccl"
        else:
            yield from _check_url("sync.url", recipe.sync.url)


def _check_url(field: str, url: str) -> Complaints:
    if unknown := _unknown_placeholders(url):
        yield f"{field}: {unknown[0]} is not a placeholder; only {{name}} and {{seed}} are replaced"
    elif not re.fullmatch(r"[a-z][a-z0-9+.-]*://\S+", url):
        yield f"{field}: {url} is not a URL; write s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or file:///FOLDER"


def _unknown_placeholders(text: str) -> list[str]:
    return re.findall(r"\{(?!name\}|seed\})[^}]*\}?", text)


def check_kernels(recipe: Recipe) -> Complaints:
    """Report kernels that would fail at the first update."""
    if recipe.kernels.linear_logprob != "triton":
        return
    if recipe.device == "cpu":
        yield "kernels.linear_logprob: triton needs a GPU; set auto"
    elif recipe.train.precision != "bf16":
        yield "kernels.linear_logprob: triton needs train.precision: bf16; set auto"


def check_deterministic(recipe: Recipe) -> Complaints:
    """Report settings with which a run is not reproducible, although `async.deterministic` is set."""
    if not recipe.async_.deterministic:
        return
    rollout = recipe.rollout
    if recipe.train.rl.signal_backoff:
        yield "train.rl.signal_backoff: which prompts are skipped depends on the order of completion; set it to false"
    if rollout.elastic:
        yield "rollout.replicas: async.deterministic needs a fixed number of replicas; write a number instead of min and max"
    if rollout.speculation.auto:
        yield "rollout.speculation.auto: depends on measured speed, which async.deterministic rules out; set auto: false"
    if rollout.speculation.num_tokens and rollout.speculation.draft_method == "probabilistic":
        yield "rollout.speculation.draft_method: probabilistic ignores the seeds of async.deterministic; set greedy"
    if (name := rollout.traits.deterministic_arg) is not None and not rollout.engine_args.get(name):
        yield f"async.deterministic: {rollout.traits.title} needs rollout.engine_args: {{{name}: true}}; set it"
