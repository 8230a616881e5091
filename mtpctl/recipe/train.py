"""The section `train`: stages, precision, memory, checkpoints, adapters."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mtpctl.families.shape import ModelShape
from mtpctl.recipe.parallel import ParallelConfig
from mtpctl.recipe.rl import RlConfig, SftOptimizerConfig
from mtpctl.recipe.section import Complaints, Float, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section, fitting


class SftConfig(Section):
    steps: NonNegativeInt = Field(0, description="Updates of the supervised stage.")
    until_loss: NonNegativeFloat = Field(
        0.0, description="End the stage once the mean loss of its last 10 updates is at most this; 0: never."
    )
    batch_size: PositiveInt = Field(64, description="Sequences of an update.")
    optimizer: SftOptimizerConfig = Field(default_factory=SftOptimizerConfig)


class OffloadConfig(Section):
    params: bool = Field(False, description="Keep parameters in host memory between uses.")
    optimizer: bool = Field(False, description="Keep optimizer state in host memory between updates.")
    grads: bool = Field(False, description="Release gradient buffers between updates.")


EXPERT_TARGETS = frozenset({"linear_fc1", "linear_fc2"})
"""The Megatron modules of which routed experts are made."""


class LoraConfig(Section):
    rank: PositiveInt = Field(16, description="Rank of the adapter.")
    alpha: PositiveFloat = Field(32.0, description="The adapter is scaled by alpha / rank.")
    targets: list[str] = Field(
        ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], description="Megatron modules that get an adapter."
    )


Replay = Literal["off", "recompute", "rollout"]


class MoeConfig(Section):
    aux_loss: NonNegativeFloat = Field(0.0, description="Weight of the loss that spreads tokens over experts (Switch, arXiv 2101.03961).")
    z_loss: NonNegativeFloat = Field(0.0, description="Weight of the loss that keeps router logits small (ST-MoE, arXiv 2202.08906).")
    bias_update: NonNegativeFloat = Field(
        0.0,
        description="Step by which each optimizer step moves the router's bias towards equal loads (DeepSeek-V3, arXiv 2412.19437); "
        "for families whose router has one.",
    )
    replay: Replay | None = Field(
        None,
        description="Experts that training sends tokens to. rollout: those of the engine that sampled them; recompute: those of the "
        "pass that made the old log-probs; off: the router's own choice. Default: rollout with vLLM, else recompute where there is "
        "such a pass.",
    )


class TrainConfig(Section):
    stages: list[Literal["sft", "rl"]] = Field(["rl"], description="Stages to run, in this order.")
    sft: SftConfig = Field(default_factory=SftConfig)
    rl: RlConfig = Field(default_factory=RlConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    precision: Literal["fp32", "bf16"] = Field(
        "bf16",
        description="Precision of parameters and activations; the optimizer's master weights are fp32. Default: bf16, and fp32 on a CPU "
        "without AMX, except for linear attention.",
    )
    tokens_per_microbatch: PositiveInt = Field(8192, description="Packed tokens of a micro-batch, at most.")
    recompute: Literal["none", "selective", "full"] = Field("none", description="Which activations the backward pass recomputes.")
    distributed_optimizer: bool = Field(False, description="Shard optimizer state over dp.")
    offload: OffloadConfig = Field(default_factory=OffloadConfig)
    lora: LoraConfig | None = Field(None, description="Train an adapter instead of the weights.")
    moe: MoeConfig = Field(default_factory=MoeConfig, description="A mixture of experts: balance, off by default, and replay of routes.")
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
    checkpoint_copy: str | None = Field(
        None,
        description="URL to which each checkpoint is copied beside training, such as s3://bucket/runs/{name}, gs://… or file:///…; {name} "
        "and {seed} are filled in. A run directory without a checkpoint begins with the newest one there.",
    )
    max_bad_steps: PositiveInt = Field(3, description="Consecutive updates skipped for NaN or inf after which the run stops.")
    max_restarts: NonNegativeInt = Field(
        3,
        description="Times within an hour that the trainer's ranks are started anew, from the newest checkpoint, after one was lost; "
        "then the run stops.",
    )
    min_dp: PositiveInt | None = Field(
        None,
        description="Fewest data-parallel ranks to go on with where a host is lost and there is no other; default: train.parallel.dp, so "
        "that the run waits for one.",
    )
    eval_every: NonNegativeInt = Field(0, description="Updates between held-out evaluations; 0: before and after RL only.")
    gpus: Annotated[Float, Field(gt=0, le=1)] = Field(1.0, description="Share of a card that each trainer rank takes, beside others on it.")
    threads: NonNegativeInt = Field(0, description="CPU threads of a trainer rank beside engines; 0: torch's own choice.")

    @property
    def revives(self) -> bool:
        """Whether checkpoints are taken on the way, from which a trainer that was lost can go on."""
        return bool(self.keep_checkpoints and (self.checkpoint_every or self.checkpoint_minutes))


def stages_fit(train: TrainConfig) -> Complaints:
    """Refuse stages, batch sizes, checkpoints and optimizer settings that contradict each other."""
    if not train.stages or len(set(train.stages)) != len(train.stages):
        yield f"train.stages: must name sft, rl or both, each once, got [{', '.join(train.stages)}]"
    for stage, steps in (("sft", train.sft.steps), ("rl", train.rl.steps)):
        if stage in train.stages and steps == 0:
            yield f"train.{stage}.steps: is 0; say how many updates, or leave {stage} out of train.stages"
    if train.rl.prompts_per_step % train.rl.minibatches:
        yield (
            f"train.rl.minibatches: {train.rl.minibatches} does not divide train.rl.prompts_per_step: {train.rl.prompts_per_step}; "
            f"{fitting(train.rl.prompts_per_step)} fit"
        )
    if train.min_dp is not None and train.min_dp > train.parallel.dp:
        yield f"train.min_dp: {train.min_dp} is more than train.parallel.dp: {train.parallel.dp}; lower it"
    if train.checkpoint_every and not train.keep_checkpoints:
        yield f"train.checkpoint_every: {train.checkpoint_every}, but train.keep_checkpoints is 0; set one of them otherwise"
    if train.checkpoint_copy and not train.keep_checkpoints:
        yield "train.checkpoint_copy: there is nothing to copy with train.keep_checkpoints: 0; set one of them otherwise"
    for name, optimizer in (("sft", train.sft.optimizer), ("rl", train.rl.optimizer)):
        if not all(0 <= beta < 1 for beta in optimizer.betas):
            yield f"train.{name}.optimizer.betas: must lie in [0, 1), got {list(optimizer.betas)}"


def lora_fits(lora: LoraConfig, shape: ModelShape) -> Complaints:
    """Refuse targets that are no layers of this model."""
    known = adapter_targets(shape)
    if not lora.targets or len(set(lora.targets)) != len(lora.targets):
        yield f"train.lora.targets: must name layers, each once, got [{', '.join(lora.targets)}]; {shape.family} has {', '.join(known)}"
    elif unknown := [target for target in lora.targets if target not in known]:
        yield f"train.lora.targets: no layer of {shape.family} is a {unknown[0]}; it has {', '.join(known)}"


def moe_fits(train: TrainConfig, shape: ModelShape) -> Complaints:
    """Refuse settings of experts and router biases that this model does not have."""
    moe = train.moe
    for name, value in (("aux_loss", moe.aux_loss), ("z_loss", moe.z_loss), ("bias_update", moe.bias_update)):
        if value and shape.moe is None:
            yield f"train.moe.{name}: {value}, but {shape.family} has no experts; set it to 0"
    if moe.replay in ("recompute", "rollout") and shape.moe is None:
        yield f"train.moe.replay: {moe.replay}, but {shape.family} has no experts; leave it out"
    if not moe.bias_update or shape.moe is None:
        return
    if not shape.moe.router_bias:
        yield f"train.moe.bias_update: {moe.bias_update}, but {shape.family}'s router has no bias; set it to 0, or take train.moe.aux_loss"
    elif train.lora is not None:
        yield f"train.moe.bias_update: {moe.bias_update} would move the base weights, which train.lora leaves as they are; set it to 0"


def adapter_targets(shape: ModelShape) -> list[str]:
    """Megatron's names of the linear layers in this model's decoder, which `train.lora.targets` may name."""
    names = ["linear_proj"] if "full_attention" in shape.layer_kinds else []
    if shape.latent:
        query = ["linear_q_proj"] if shape.latent.q_rank is None else ["linear_q_down_proj", "linear_q_up_proj"]
        names = [*query, "linear_kv_down_proj", "linear_kv_up_proj", *names]
    elif names:
        names = ["linear_qkv", *names]
    delta = ["in_proj", "out_proj"] if "linear_attention" in shape.layer_kinds else []
    return [*names, *delta, "linear_fc1", "linear_fc2"]
