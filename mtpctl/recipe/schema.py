"""The recipe: every key that a run can be given, with its type, its default and what it is for.

Each section is one pydantic model, strict about unknown keys, importable without torch. The descriptions are what
`mtpctl recipe show`, the JSON schema and the reference page print, so they are written for whoever edits YAML.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _number(value: Any) -> Any:
    """YAML's `true` is not 1."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number, got {str(value).lower()}")
    return value


Int = Annotated[int, BeforeValidator(_number)]
Float = Annotated[float, BeforeValidator(_number)]
PositiveInt = Annotated[Int, Field(gt=0)]
PositiveFloat = Annotated[Float, Field(gt=0)]
NonNegativeInt = Annotated[Int, Field(ge=0)]
NonNegativeFloat = Annotated[Float, Field(ge=0)]
Fraction = Annotated[Float, Field(ge=0, le=1)]
HomePath = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path (or a hub id) in which `~` is the home of whoever loads the recipe: what reads it later need not know."""


class Section(BaseModel):
    """Base of all sections: an unknown key is an error, and so is a value of another type."""

    model_config = ConfigDict(extra="forbid", validate_default=True, frozen=True, populate_by_name=True, allow_inf_nan=False)


DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""What torch and the engines call the precisions."""

# ----------------------------------------------------------------------------------------------------- model and MTP


BYTE_VOCAB_SIZE = 259
"""Ids of the tokenizer `bytes`: a byte each, padding, begin and end."""


class ModelConfig(Section):
    path: HomePath | None = Field(None, description="Hugging Face folder, or hub id such as XiaomiMiMo/MiMo-7B-RL.")
    init: Literal["weights", "random"] = Field("weights", description="Load the weights, or draw them from the seed.")
    config: dict[str, Any] | None = Field(
        None, description="Hugging Face config.json fields, inline: a new model of this shape is made in the run directory."
    )
    tokenizer: HomePath | None = Field(None, description="Tokenizer folder, or `bytes`; default: the one beside the model.")

    @property
    def drawn(self) -> bool:
        """Whether the weights that a run begins with are drawn from its seed, into its directory."""
        return self.config is not None or self.init == "random"


class MtpConfig(Section):
    mode: Literal["off", "load", "joint", "isolated"] = Field(
        "isolated",
        description="off: no MTP layers; load: kept and exported, not trained; joint: its loss also moves the trunk; "
        "isolated: trained on a trunk, embedding and head that its loss cannot move.",
    )
    loss_scale: NonNegativeFloat = Field(0.1, description="Weight of the MTP loss beside the main loss.")
    clip_grad: NonNegativeFloat = Field(1.0, description="Clip the MTP layers' own gradient norm here; 0: never.")
    repeat: PositiveInt = Field(1, description="Depths to train through one MTP layer, where the family shares it.")

    @property
    def trains(self) -> bool:
        """Whether MTP layers that are there are trained."""
        return self.mode in ("joint", "isolated")


# -------------------------------------------------------------------------------------------------------- training


class ParallelConfig(Section):
    tp: PositiveInt = Field(1, description="Tensor-parallel ranks.")
    pp: PositiveInt = Field(1, description="Pipeline-parallel ranks.")
    cp: PositiveInt = Field(1, description="Context-parallel ranks.")
    ep: PositiveInt = Field(1, description="Expert-parallel ranks.")
    dp: PositiveInt = Field(1, description="Data-parallel ranks.")
    sequence_parallel: bool = Field(False, description="Split activations outside the matmuls over the tp ranks.")
    pp_layout: list[NonNegativeInt] | None = Field(
        None, description="Decoder layers of each pipeline stage; default: even, the MTP layers on the last."
    )

    @property
    def world_size(self) -> int:
        """Ranks in all. Expert parallelism reuses the data-parallel ranks."""
        return self.tp * self.pp * self.cp * self.dp


class OptimizerConfig(Section):
    lr: PositiveFloat = Field(1e-6, description="Peak learning rate.")
    mtp_lr: PositiveFloat | None = Field(None, description="Learning rate of the MTP layers; default: the same.")
    betas: tuple[Float, Float] = Field((0.9, 0.95), description="Adam's decay rates.")
    eps: PositiveFloat = Field(1e-8, description="Adam's epsilon.")
    weight_decay: NonNegativeFloat = Field(0.0, description="Decoupled weight decay.")
    warmup_steps: NonNegativeInt = Field(0, description="Linear warm-up from zero, in optimizer steps (RL takes `minibatches` an update).")
    min_lr_ratio: Fraction = Field(1.0, description="Cosine decay to this share of the peak; 1: constant.")
    clip_grad: NonNegativeFloat = Field(1.0, description="Clip the trunk's gradient norm here; 0: never.")


class SftOptimizerConfig(OptimizerConfig):
    lr: PositiveFloat = Field(1e-5, description="Peak learning rate.")


class SftConfig(Section):
    steps: NonNegativeInt = Field(0, description="Updates of the supervised stage.")
    until_loss: NonNegativeFloat = Field(
        0.0, description="End the stage once the mean loss of its last 10 updates is at most this; 0: never."
    )
    batch_size: PositiveInt = Field(64, description="Sequences an update.")
    optimizer: SftOptimizerConfig = Field(default_factory=SftOptimizerConfig)


class OverlongConfig(Section):
    enabled: bool = Field(False, description="Punish responses near the length limit (DAPO's soft overlong punishment).")
    buffer: PositiveInt = Field(64, description="Tokens before the limit over which the penalty grows.")
    penalty: NonNegativeFloat = Field(1.0, description="Penalty at the limit.")


class CorrectionConfig(Section):
    """Off-policy correction by the ratio of old log-probs to behaviour log-probs."""

    mode: Literal["off", "truncate", "clip", "mask"] = Field(
        "off",
        description="off; truncate: weights capped above (TIS); clip: bounded both sides; mask: outside the band dropped (MIS, IcePop).",
    )
    level: Literal["token", "sequence"] = Field("token", description="Ratio of each token, or of the whole response.")
    low: NonNegativeFloat = Field(0.0, description="Lower bound of the ratio.")
    high: PositiveFloat = Field(2.0, description="Upper bound of the ratio.")


class RlConfig(Section):
    steps: NonNegativeInt = Field(0, description="Policy updates.")
    prompts_per_step: PositiveInt = Field(32, description="Groups an update trains on.")
    group_size: PositiveInt = Field(8, description="Responses a prompt (n).")
    minibatches: PositiveInt = Field(1, description="Optimizer steps that one update's groups are split over.")
    train_mtp: bool = Field(True, description="Whether RL trains the MTP layers too; false keeps them as they came.")
    loss: Literal["ppo", "gspo", "decoupled"] = Field(
        "ppo", description="ppo: token ratio, clipped; gspo: sequence ratio; decoupled: behaviour and proximal policy apart."
    )
    advantage: Literal["grpo", "grpo_no_std", "rloo"] = Field("grpo", description="Group baseline and normalisation.")
    aggregate: Literal["token", "sequence"] = Field("token", description="Mean over all tokens (DAPO), or over sequences of their means.")
    old_logprobs: Literal["auto", "recompute", "behaviour"] = Field(
        "auto",
        description="What the ratio is taken against. behaviour: the engine's own log-probs, so that the clip holds stale samples back; "
        "recompute: Megatron's, by the trainer at the update or by the log-prob server; auto: behaviour where samples can be stale, "
        "recompute on policy, and where a log-prob server, a correction or loss: decoupled needs it.",
    )
    clip_low: PositiveFloat = Field(0.2, description="Ratio clip below 1.")
    clip_high: PositiveFloat = Field(0.28, description="Ratio clip above 1 (clip-higher).")
    clip_dual: NonNegativeFloat = Field(0.0, description="Dual clip for negative advantages; 0: none.")
    entropy_coef: Float = Field(0.0, description="Entropy bonus.")
    kl_coef: NonNegativeFloat = Field(0.0, description="KL penalty to the reference policy (the model before RL).")
    kl_estimator: Literal["k2", "k3"] = Field("k3", description="How that KL is estimated from samples; k3 as in GRPO.")
    dynamic_sampling: bool = Field(True, description="Groups whose rewards are all equal are replaced by fresh ones.")
    overlong: OverlongConfig = Field(default_factory=OverlongConfig)
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)


class OffloadConfig(Section):
    params: bool = Field(False, description="Parameters to host memory between uses.")
    optimizer: bool = Field(False, description="Optimizer state to host memory between updates.")
    grads: bool = Field(False, description="Gradient buffers released between updates.")


class LoraConfig(Section):
    rank: PositiveInt = Field(16, description="Rank of the adapter.")
    alpha: PositiveFloat = Field(32.0, description="Scale: alpha / rank.")
    targets: list[str] = Field(
        ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], description="Megatron modules that get an adapter."
    )


class TrainConfig(Section):
    stages: list[Literal["sft", "rl"]] = Field(["rl"], description="What to run, in this order.")
    sft: SftConfig = Field(default_factory=SftConfig)
    rl: RlConfig = Field(default_factory=RlConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    precision: Literal["fp32", "bf16"] = Field("bf16", description="Of parameters and activations; masters stay fp32.")
    tokens_per_microbatch: PositiveInt = Field(8192, description="Packed tokens a micro-batch, at most.")
    recompute: Literal["none", "selective", "full"] = Field("none", description="Activations recomputed in the backward pass.")
    distributed_optimizer: bool = Field(False, description="Shard optimizer state over dp.")
    offload: OffloadConfig = Field(default_factory=OffloadConfig)
    lora: LoraConfig | None = Field(None, description="Train an adapter instead of the weights.")
    async_save: bool = Field(False, description="Write checkpoints while training goes on; costs host memory of their size.")
    checkpoint_every: NonNegativeInt = Field(
        0, description="Updates between checkpoints, beside those of checkpoint_minutes; 0: none by count."
    )
    checkpoint_minutes: NonNegativeFloat = Field(
        10.0, description="Minutes from one checkpoint to the next, taken after the update under way; 0: none by time."
    )
    keep_checkpoints: NonNegativeInt = Field(
        2, description="Newest checkpoints kept; 0: none is written, so that the run can be neither resumed nor converted."
    )
    max_bad_steps: PositiveInt = Field(3, description="Updates in a row skipped for NaN or inf before the run stops.")
    eval_every: NonNegativeInt = Field(0, description="Updates between held-out evaluations; 0: before and after RL only.")
    gpus: Annotated[Float, Field(gt=0, le=1)] = Field(1.0, description="Share of a card that each trainer rank takes, beside others on it.")
    threads: NonNegativeInt = Field(0, description="CPU threads of a trainer rank beside engines; 0: torch's own choice.")


# -------------------------------------------------------------------------------------------------------- rollout


class SpeculationConfig(Section):
    num_tokens: NonNegativeInt = Field(1, description="Draft tokens a step (k); 0: no speculation.")
    auto: bool = Field(
        False, description="From 0 to num_tokens a step, as measured to pay on live load; looked at again as load and weights change."
    )


class RolloutBase(Section):
    replicas: PositiveInt = Field(1, description="Engines.")
    tp: PositiveInt = Field(1, description="Tensor-parallel ranks of each engine.")
    temperature: PositiveFloat = Field(1.0, description="Sampling temperature.")
    top_p: Annotated[Float, Field(gt=0, le=1)] = Field(1.0, description="Nucleus sampling; below 1 needs a correction to train on.")
    top_k: NonNegativeInt = Field(0, description="Top-k sampling; 0: off; else needs a correction to train on.")
    max_tokens: PositiveInt = Field(1024, description="Response tokens, at most.")
    context: PositiveInt | None = Field(None, description="Prompt and response tokens, at most; default: the model's.")
    stop: list[Annotated[str, Field(min_length=1)]] = Field([], description="Strings that end a response.")
    stop_ids: list[NonNegativeInt] = Field([], description="Tokens that end a response, beside the tokenizer's end token.")
    environment: Literal["single", "calculator"] = Field(
        "single", description="What answers the model's turns. single: nothing; calculator: computes what stands in <calc>…</calc>."
    )
    max_turns: PositiveInt = Field(8, description="Turns of the model in one response, with an environment.")
    dtype: Literal["auto", "fp32", "bf16"] = Field("auto", description="auto: the trainer's precision.")
    max_in_flight: PositiveInt = Field(256, description="Requests an engine works on at once.")
    kv_cache_bytes: PositiveInt | None = Field(None, description="KV cache of each engine; default: by gpu_memory.")
    gpus: Annotated[Float, Field(gt=0, le=1)] | None = Field(
        None, description="Share of a card that each engine rank takes, beside others on it; default: what logprob.gpus leaves."
    )
    gpu_memory: Fraction = Field(0.85, description="Share of the card that the engine may fill.")
    deadline_s: PositiveFloat = Field(
        600.0,
        description="Seconds that an engine may work on a response, all its turns together, before it is cut; waiting does not count.",
    )
    max_restarts: NonNegativeInt = Field(3, description="Restarts of a replica within an hour before it is quarantined.")
    threads: NonNegativeInt = Field(0, description="CPU threads of an engine; 0: one beside a card, else its own choice.")
    speculation: SpeculationConfig = Field(default_factory=SpeculationConfig)
    engine_args: dict[str, Any] = Field({}, description="Passed to the engine as they are, checked against its option names.")


class VllmConfig(RolloutBase):
    engine: Literal["vllm"] = Field("vllm", description="What generates.")
    eager: bool = Field(False, description="No compilation and no CUDA graphs: faster to start, slower to run.")


class SglangConfig(RolloutBase):
    engine: Literal["sglang"] = Field("sglang", description="What generates.")
    python: HomePath | None = Field(None, description="Interpreter of the environment that holds SGLang.")
    draft_top_k: PositiveInt = Field(1, description="Branches that each step of the draft tree grows; 1: a chain.")
    draft_steps: PositiveInt | None = Field(None, description="Steps of the draft tree; default, and a must for a chain: num_tokens.")


RolloutConfig = Annotated[VllmConfig | SglangConfig, Field(discriminator="engine")]


# ---------------------------------------------------------------------------------------------- async, sync, log-probs


class AsyncConfig(Section):
    staleness_threshold: NonNegativeFloat = Field(
        0.5, description="Share of samples, beyond what the updates until the next sync need, that may be generated ahead; 0: none."
    )
    max_staleness: NonNegativeInt = Field(
        8,
        description="Greatest age of a trained token, in versions behind the published one; prompts of older groups are sent out again, "
        "and the trainer waits for those.",
    )
    sync_every: PositiveInt = Field(1, description="Updates between weight syncs.")
    partial_rollout: bool = Field(True, description="Responses in flight at a sync go on under the new weights.")
    deterministic: bool = Field(False, description="Same seed, same loss: no staleness, fixed batches in prompt order, a seed per request.")

    @property
    def staleness(self) -> float:
        """The threshold that holds: a deterministic run generates nothing ahead, and none generates what would get too old in line."""
        return 0.0 if self.deterministic else min(self.staleness_threshold, self.max_staleness)


VLLM_ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM reserves room for; an adapter of another rank takes the next one."""


class SyncBase(Section):
    bucket_bytes: PositiveInt = Field(1 << 30, description="Bytes of a bucket, at most.")
    sections: list[Literal["target", "draft", "adapter"]] = Field(
        ["target", "draft"],
        description="What moves at each sync. With train.lora: target is weights with the adapter merged in; adapter, in its place, "
        "the adapter alone.",
    )
    verify: Literal["first", "always", "never"] = Field("first", description="When checksums of every tensor are compared on both ends.")
    pause: Literal["keep", "abort", "wait"] = Field("keep", description="What requests in flight do during a sync.")
    deadline_s: PositiveFloat = Field(120.0, description="Seconds after which a sync is given up.")
    release_kv: bool = Field(False, description="Engines give the memory of their KV cache back for the time of a sync.")
    on_collapse: Literal["warn", "error"] = Field("warn", description="When acceptance falls under half its running mean after a sync.")


class ShmConfig(SyncBase):
    transport: Literal["shm"] = Field("shm", description="One host, through its shared memory; from and to cards too.")


class IpcConfig(SyncBase):
    transport: Literal["ipc"] = Field("ipc", description="CUDA, one host, through memory handles.")


class NcclConfig(SyncBase):
    transport: Literal["nccl"] = Field("nccl", description="CUDA, any hosts.")


SyncConfig = Annotated[ShmConfig | IpcConfig | NcclConfig, Field(discriminator="transport")]


class LogprobConfig(Section):
    standalone: bool = Field(False, description="Old log-probs from servers beside generation, not from the trainer.")
    replicas: PositiveInt = Field(1, description="Servers.")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    tokens_per_batch: PositiveInt = Field(16384, description="Packed tokens a forward pass, at most.")
    queue_tokens: PositiveInt = Field(1 << 20, description="Tokens that may wait before callers are told to.")
    keep_previous: bool = Field(False, description="Hold the weight version before the current one as well.")
    gpus: NonNegativeFloat = Field(1.0, description="GPUs of each rank; a fraction shares the card.")


# ------------------------------------------------------------------------------------------- data, kernels, the rest


class GeneratedTask(Section):
    """A verifiable task that is generated from the seed."""

    name: Literal["addition", "subtraction", "multiplication", "reverse", "sort"] = Field("addition", description="Which task.")
    min_digits: PositiveInt = Field(1, description="Shortest operand (or string).")
    max_digits: PositiveInt = Field(3, description="Longest operand (or string).")
    length_decay: PositiveFloat = Field(
        1.0, le=1, description="Each length has this many times the problems of the one before: below 1, a long tail of lengths."
    )
    train_size: PositiveInt = Field(20000, description="Training problems.")
    eval_size: PositiveInt = Field(256, description="Held-out problems, disjoint from training.")


class DataConfig(Section):
    path: HomePath | None = Field(None, description="JSONL or Parquet with `prompt` and `answer` columns.")
    eval_path: HomePath | None = Field(None, description="The same, held out.")
    task: GeneratedTask | None = Field(None, description="Generate the problems instead of reading them.")
    sft_path: HomePath | None = Field(None, description="Problems with `solution` for the supervised stage; default: the same as RL's.")
    sft_task: GeneratedTask | None = Field(
        None, description="Generate the supervised stage's problems, less what is held out; default: RL's."
    )
    checker: Literal["exact", "math"] = Field(
        "exact", description="exact: the text after the last `#` of response and answer; math: math-verify."
    )
    chat_template: bool = Field(False, description="Wrap prompts in the tokenizer's chat template.")
    system_prompt: str | None = Field(None, description="System message, with a chat template.")
    shuffle: bool = Field(True, description="Draw prompts in an order given by the seed.")


class KernelsConfig(Section):
    linear_logprob: Literal["auto", "reference", "chunked", "triton", "liger"] = Field(
        "auto", description="How log-probs and losses are made from hidden states; `reference` and `liger` make no loss in one pass."
    )
    workspace_bytes: PositiveInt = Field(1 << 30, description="Memory that log-prob kernels may use beside their inputs and outputs.")


class ClusterConfig(Section):
    address: str | None = Field(None, description="Ray cluster to join; default: one is started on this machine.")
    num_cpus: PositiveInt | None = Field(None, description="CPUs of the local cluster; default: this machine's.")
    num_gpus: NonNegativeInt | None = Field(None, description="GPUs of the local cluster; default: this machine's.")
    gpus_per_node: PositiveInt = Field(8, description="GPUs of a host, for the placement plan.")
    gpu_gib: PositiveFloat | None = Field(None, description="Memory of a card in GiB, for the memory plan; default: nothing is checked.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one.")
    actor_deadline_s: PositiveFloat = Field(300.0, description="Seconds that an actor has to start.")
    step_deadline_s: PositiveFloat = Field(
        1800.0,
        description="Seconds without a response for an incomplete batch, or of one call to a trainer, after which the run stops.",
    )


class TelemetryConfig(Section):
    tensorboard: bool = Field(True, description="Write `tensorboard/` in the run directory.")
    wandb: str | None = Field(None, description="Weights & Biases project, where that package is installed.")
    profile: bool = Field(False, description="Profile the third update of each stage: trace and tables in `logs/` of the run directory.")


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
