"""The section `train`: stages, precision, memory, checkpoints and adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from mtpctl.families.shape import ModelShape
from mtpctl.recipe.rl import DraftOptimizerConfig, RlConfig, SftOptimizerConfig
from mtpctl.recipe.section import (
    Complaints,
    Float,
    NonNegativeFloat,
    NonNegativeInt,
    ParallelConfig,
    PositiveFloat,
    PositiveInt,
    Section,
    divisors_text,
)

if TYPE_CHECKING:
    from mtpctl.recipe.schema import Recipe


class SftConfig(Section):
    steps: NonNegativeInt = Field(0, description="Updates of the supervised stage.")
    until_loss: NonNegativeFloat = Field(0.0, description="End the stage when the mean loss of 10 updates is at most this value; 0: never.")
    batch_size: PositiveInt = Field(64, description="Sequences per update.")
    optimizer: SftOptimizerConfig = Field(default_factory=SftOptimizerConfig)


class DraftConfig(Section):
    """The stage that trains only the MTP layers, or an added drafter. The trunk is frozen."""

    steps: NonNegativeInt = Field(0, description="Updates of the stage.")
    batch_size: PositiveInt = Field(64, description="Sequences per update.")
    samples: NonNegativeInt = Field(
        4096,
        description="Responses that the model generates for the training prompts, and that the stage trains on; 0: train on the "
        "responses of the rows instead, as the supervised stage does.",
    )
    optimizer: DraftOptimizerConfig = Field(default_factory=DraftOptimizerConfig)


class OffloadConfig(Section):
    params: bool = Field(False, description="Keep parameters in host memory between uses.")
    optimizer: bool = Field(False, description="Keep optimizer state in host memory between updates.")
    grads: bool = Field(False, description="Release gradient buffers between updates.")


EXPERT_TARGETS = frozenset({"linear_fc1", "linear_fc2"})
"""Megatron modules of routed experts."""


class LoraConfig(Section):
    rank: PositiveInt = Field(16, description="Rank of the adapter.")
    alpha: PositiveFloat = Field(32.0, description="Scale of the adapter: alpha / rank.")
    targets: list[str] = Field(["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], description="Megatron modules with an adapter.")


Replay = Literal["off", "recompute", "rollout"]


class MoeConfig(Section):
    aux_loss: NonNegativeFloat = Field(0.0, description="Weight of the load-balancing loss (Switch, arXiv 2101.03961).")
    z_loss: NonNegativeFloat = Field(0.0, description="Weight of the router z-loss (ST-MoE, arXiv 2202.08906).")
    bias_update: NonNegativeFloat = Field(
        0.0,
        description="Update rate of the router bias toward equal loads, per optimizer step (DeepSeek-V3, arXiv 2412.19437); for families "
        "with a router bias.",
    )
    replay: Replay | None = Field(
        None,
        description="Source of expert routes in training. rollout: the engine that sampled the tokens; recompute: the pass that computed "
        "the old log-probs; off: the router. Default: rollout with vLLM, else recompute if there is such a pass.",
    )


class TrainConfig(Section):
    stages: list[Literal["draft", "sft", "rl"]] = Field(["rl"], description="Stages in order. draft: trains only the drafter.")
    draft: DraftConfig = Field(default_factory=DraftConfig)
    sft: SftConfig = Field(default_factory=SftConfig)
    rl: RlConfig = Field(default_factory=RlConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    precision: Literal["fp32", "bf16"] = Field(
        "bf16",
        description="Precision of parameters and activations; the optimizer's master weights are fp32. Default: bf16, but fp32 on a CPU "
        "without AMX, except for linear attention.",
    )
    tokens_per_microbatch: PositiveInt = Field(8192, description="Maximum packed tokens in a microbatch.")
    recompute: Literal["none", "selective", "full"] = Field("none", description="Activations that the backward pass recomputes.")
    distributed_optimizer: bool = Field(False, description="Shard the optimizer state over dp.")
    offload: OffloadConfig = Field(default_factory=OffloadConfig)
    lora: LoraConfig | None = Field(None, description="Train a LoRA adapter instead of the weights.")
    moe: MoeConfig = Field(default_factory=MoeConfig, description="Mixture of experts: load balancing (off by default) and router replay.")
    async_save: bool = Field(False, description="Write checkpoints during training; needs host memory of their size.")
    checkpoint_every: NonNegativeInt = Field(0, description="Updates between checkpoints, in addition to those by time; 0: none.")
    checkpoint_minutes: NonNegativeFloat = Field(10.0, description="Minutes between checkpoints, each written after an update; 0: none.")
    keep_checkpoints: NonNegativeInt = Field(2, description="Number of newest checkpoints to keep; 0: none, so no run can resume.")
    checkpoint_copy: str | None = Field(
        None,
        description="URL to which each checkpoint is copied during training, such as s3://bucket/runs/{name}, gs://… or file:///…; {name} "
        "and {seed} are replaced. A run directory without a checkpoint starts from the newest copy.",
    )
    max_bad_steps: PositiveInt = Field(3, description="Consecutive updates skipped for NaN or inf before the run stops.")
    max_restarts: NonNegativeInt = Field(3, description="Restarts of a lost trainer from a checkpoint within an hour before the run stops.")
    min_dp: PositiveInt | None = Field(
        None,
        description="Minimum data-parallel ranks to continue with after a host is lost and cannot be replaced; default: train.parallel.dp, "
        "so the run waits for a host.",
    )
    eval_every: NonNegativeInt = Field(0, description="Updates between held-out evaluations; 0: only before and after RL.")
    gpus: Annotated[Float, Field(gt=0, le=1)] = Field(1.0, description="Share of a GPU per trainer rank.")
    threads: NonNegativeInt = Field(0, description="CPU threads of a trainer rank while engines run; 0: torch's default.")

    @property
    def needs_rollout(self) -> bool:
        """Whether a stage needs rollout engines."""
        return "rl" in self.stages or ("draft" in self.stages and self.draft.samples > 0)

    @property
    def trains_on_rows(self) -> bool:
        """Whether a stage trains on the responses of rows."""
        return "sft" in self.stages or ("draft" in self.stages and not self.draft.samples)

    @property
    def restarts_trainer(self) -> bool:
        """Whether checkpoints are taken during training, from which a lost trainer can resume."""
        return bool(self.keep_checkpoints and (self.checkpoint_every or self.checkpoint_minutes))


def check_train(train: TrainConfig) -> Complaints:
    """Report stages, batch sizes, checkpoints and optimizer settings that contradict each other."""
    if not train.stages or len(set(train.stages)) != len(train.stages):
        yield f"train.stages: must be draft, sft and rl, at least one and each at most once, got [{', '.join(train.stages)}]"
    if "draft" in train.stages[1:] and train.draft.samples:
        yield "train.stages: draft must come first, because its samples are generated with the weights of model.path; move it"
    if "draft" in train.stages and len(train.stages) > 1 and train.distributed_optimizer:
        yield (
            "train.distributed_optimizer: is not supported in the stage draft, whose optimizer has only the drafter's parameters; set it "
            "to false, or add the drafter first (mtpctl add-drafter)"
        )
    for stage, steps in (("draft", train.draft.steps), ("sft", train.sft.steps), ("rl", train.rl.steps)):
        if stage in train.stages and steps == 0:
            yield f"train.{stage}.steps: is 0; set the number of updates, or leave {stage} out of train.stages"
    if train.rl.prompts_per_step % train.rl.minibatches:
        yield (
            f"train.rl.minibatches: {train.rl.minibatches} does not divide train.rl.prompts_per_step: {train.rl.prompts_per_step}; "
            f"{divisors_text(train.rl.prompts_per_step)} fit"
        )
    if train.min_dp is not None and train.min_dp > train.parallel.dp:
        yield f"train.min_dp: {train.min_dp} is more than train.parallel.dp: {train.parallel.dp}; lower it"
    if train.checkpoint_every and not train.keep_checkpoints:
        yield f"train.checkpoint_every: {train.checkpoint_every}, but train.keep_checkpoints is 0; change one of them"
    if train.checkpoint_copy and not train.keep_checkpoints:
        yield "train.checkpoint_copy: there is nothing to copy with train.keep_checkpoints: 0; change one of them"
    for name, optimizer in (("draft", train.draft.optimizer), ("sft", train.sft.optimizer), ("rl", train.rl.optimizer)):
        if not all(0 <= beta < 1 for beta in optimizer.betas):
            yield f"train.{name}.optimizer.betas: must lie in [0, 1), got {list(optimizer.betas)}"


def check_lora(lora: LoraConfig, shape: ModelShape) -> Complaints:
    """Report targets that this model does not have."""
    known = adapter_targets(shape)
    if not lora.targets or len(set(lora.targets)) != len(lora.targets):
        yield f"train.lora.targets: must be layers, each once, got [{', '.join(lora.targets)}]; {shape.family} has {', '.join(known)}"
    elif unknown := [target for target in lora.targets if target not in known]:
        yield f"train.lora.targets: no layer of {shape.family} is a {unknown[0]}; it has {', '.join(known)}"


def check_replay(recipe: Recipe) -> Complaints:
    """Report replay of expert routes that nothing records."""
    replay = recipe.train.moe.replay
    if replay == "recompute" and recipe.old_logprobs == "behaviour":
        yield "train.moe.replay: recompute has no pass to record routes, because the engine's log-probs are used; set rollout, or off"
    if replay != "rollout":
        return
    if not recipe.rollout.traits.routes:
        yield "train.moe.replay: rollout works with rollout.engine: vllm; set recompute, or off"
    elif not recipe.engine_returns_routes:
        fix = "leave enable_prefix_caching out, or set train.moe.replay: off"
        yield f"rollout.engine_args: vLLM returns routes only with prefix caching; {fix}"


def check_moe(train: TrainConfig, shape: ModelShape) -> Complaints:
    """Report settings for experts and router biases that this model does not have."""
    moe = train.moe
    for name, value in (("aux_loss", moe.aux_loss), ("z_loss", moe.z_loss), ("bias_update", moe.bias_update)):
        if value and shape.moe is None:
            yield f"train.moe.{name}: {value}, but {shape.family} has no experts; set it to 0"
    if moe.replay in ("recompute", "rollout") and shape.moe is None:
        yield f"train.moe.replay: {moe.replay}, but {shape.family} has no experts; leave it out"
    if not moe.bias_update or shape.moe is None:
        return
    if not shape.moe.router_bias:
        yield f"train.moe.bias_update: {moe.bias_update}, but {shape.family}'s router has no bias; set it to 0, or use train.moe.aux_loss"
    elif train.lora is not None:
        yield f"train.moe.bias_update: {moe.bias_update} would change the base weights, which train.lora freezes; set it to 0"


def adapter_targets(shape: ModelShape) -> list[str]:
    """Valid `train.lora.targets`: Megatron's names of the linear layers in this model's decoder."""
    names = ["linear_proj"] if "full_attention" in shape.layer_kinds else []
    if shape.latent:
        query = ["linear_q_proj"] if shape.latent.q_rank is None else ["linear_q_down_proj", "linear_q_up_proj"]
        names = [*query, "linear_kv_down_proj", "linear_kv_up_proj", *names]
    elif names:
        names = ["linear_qkv", *names]
    delta = ["in_proj", "out_proj"] if "linear_attention" in shape.layer_kinds else []
    return [*names, *delta, "linear_fc1", "linear_fc2"]
