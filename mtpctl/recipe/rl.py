"""The section `train.rl`: the policy update, its loss, advantages and off-policy correction."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mtpctl.recipe.optimizer import OptimizerConfig
from mtpctl.recipe.section import Complaints, Float, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


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
    prompts_per_step: PositiveInt = Field(32, description="Prompts of an update, each with one group of responses.")
    group_size: PositiveInt = Field(8, description="Responses to each prompt (n).")
    minibatches: PositiveInt = Field(1, description="Optimizer steps of an update, over which its groups are split.")
    train_mtp: bool = Field(True, description="Train the MTP layers in RL, too; false: RL leaves them as they are.")
    loss: Literal["ppo", "gspo", "decoupled"] = Field(
        "ppo", description="ppo: token ratio, clipped; gspo: sequence ratio; decoupled: PPO with a proximal policy of its own."
    )
    advantage: Literal["grpo", "grpo_no_std", "rloo"] = Field(
        "grpo", description="Baseline of a group, and whether advantages are divided by its standard deviation."
    )
    aggregate: Literal["token", "sequence"] = Field("token", description="Mean over all tokens (DAPO), or over sequences of their means.")
    old_logprobs: Literal["auto", "recompute", "behaviour"] = Field(
        "auto",
        description="Log-probs that the ratio is taken against. behaviour: the engine's own, so that the clip bounds stale samples, too; "
        "recompute: Megatron's, computed by the trainer at the update or by the log-prob server; auto: behaviour where samples can be "
        "stale, recompute on policy and where a log-prob server, a correction or loss: decoupled needs it.",
    )
    clip_low: PositiveFloat = Field(0.2, description="The ratio is clipped at 1 less this.")
    clip_high: PositiveFloat = Field(0.28, description="The ratio is clipped at 1 plus this (clip-higher).")
    clip_dual: NonNegativeFloat = Field(0.0, description="Bound of the ratio for negative advantages (dual clip); 0: none.")
    entropy_coef: Float = Field(0.0, description="Weight of the entropy bonus.")
    kl_coef: NonNegativeFloat = Field(0.0, description="Weight of the KL penalty to the reference policy, the model before RL.")
    kl_estimator: Literal["k2", "k3"] = Field("k3", description="Estimator of that KL from samples; GRPO uses k3.")
    dynamic_sampling: bool = Field(True, description="Groups whose rewards are all equal are replaced by fresh ones.")
    overlong: OverlongConfig = Field(default_factory=OverlongConfig)
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)


def correction_fits(correction: CorrectionConfig) -> Complaints:
    """Refuse bounds between which no ratio lies."""
    if correction.mode in ("clip", "mask") and correction.low >= correction.high:
        yield f"train.rl.correction.low: must be below high: {correction.high}, got {correction.low}"


def clips_fit(rl: RlConfig) -> Complaints:
    """Refuse clips that would clip every ratio, or none."""
    if rl.clip_low >= 1:
        yield f"train.rl.clip_low: must be below 1, got {rl.clip_low}"
    if 0 < rl.clip_dual <= 1:
        yield f"train.rl.clip_dual: must be above 1, or 0 for none, got {rl.clip_dual}"
