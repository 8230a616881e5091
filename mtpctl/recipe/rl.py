"""The section `train.rl`: the policy update, its loss, advantages and off-policy correction."""

from __future__ import annotations

import difflib
import os
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from mtpctl.recipe.parallel import ParallelConfig
from mtpctl.recipe.presets import PRESETS, laid_over
from mtpctl.recipe.section import (
    Complaints,
    Float,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)
from mtpctl.user_code import is_reference

# The sections `train.sft.optimizer` and `train.rl.optimizer`.


class OptimizerConfig(Section):
    lr: PositiveFloat = Field(1e-6, description="Peak learning rate.")
    mtp_lr: PositiveFloat | None = Field(None, description="Learning rate of the MTP layers; default: the same.")
    betas: tuple[Float, Float] = Field((0.9, 0.95), description="Adam's decay rates.")
    eps: PositiveFloat = Field(1e-8, description="Adam's epsilon.")
    weight_decay: NonNegativeFloat = Field(0.0, description="Decoupled weight decay.")
    warmup_steps: NonNegativeInt = Field(
        0, description="Linear warm-up from zero, in optimizer steps, of which an RL update makes `minibatches`."
    )
    min_lr_ratio: Fraction = Field(1.0, description="Cosine decay to this share of the peak; 1: constant.")
    clip_grad: NonNegativeFloat = Field(1.0, description="Largest gradient norm of the trunk, beyond which it is clipped; 0: never.")


class SftOptimizerConfig(OptimizerConfig):
    lr: PositiveFloat = Field(1e-5, description="Peak learning rate.")


LOSSES = ("ppo", "gspo", "decoupled", "cispo", "sapo")
"""Built-in losses."""
ADVANTAGES = ("grpo", "grpo_no_std", "rloo", "reinforce_pp", "reinforce_pp_baseline")
"""Built-in advantages."""


def _built_in_or_user_defined(names: tuple[str, ...]) -> AfterValidator:
    def check(value: str) -> str:
        if value in names:
            return value
        if not is_reference(value):
            near = difflib.get_close_matches(value, names, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"must be {', '.join(names)}, or FILE.py:NAME or MODULE:NAME, got {value!r}{hint}")
        return os.path.expanduser(value)

    return AfterValidator(check)


Loss = Annotated[str, _built_in_or_user_defined(LOSSES)]
Advantage = Annotated[str, _built_in_or_user_defined(ADVANTAGES)]


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


POLICY = "policy"
"""`train.rl.teacher.path` of a teacher that is the policy itself."""


MOST_CANDIDATES = 32
"""The most tokens a place of which a teacher's probabilities are asked for."""


class TeacherConfig(Section):
    """On-policy distillation: the policy samples, and learns what a teacher thinks of each of its tokens."""

    path: str | None = Field(
        None,
        description="Model folder or hub id of a teacher that the run serves itself; or policy: the policy itself, as the run's log-prob "
        "server has it, whose prompts get the hint.",
    )
    url: str | None = Field(None, description="Address of the log-prob server that serves the teacher (mtpctl logprob-serve).")
    kl: Literal["reverse", "forward"] = Field(
        "reverse",
        description="reverse: the KL from the policy to the teacher, which takes up the teacher's likeliest answers; forward: from the "
        "teacher to the policy, which covers all of them.",
    )
    topk: Annotated[int, Field(ge=0, le=MOST_CANDIDATES)] = Field(
        0,
        description="The teacher's likeliest tokens that are compared at each place, the rest taken as one; 0: the sampled token alone, "
        "which estimates the KL.",
    )
    coef: PositiveFloat = Field(1.0, description="Weight of the KL in the loss; with topk: 0 of its estimate in a token's advantage.")
    rewards: bool = Field(True, description="Rewards count as well; false: the teacher alone.")
    hint: str | None = Field(
        None,
        description="What the teacher reads in place of the prompt, such as '{prompt} (the answer is {answer})': the prompt, the answer "
        "and the row's other columns are filled in.",
    )
    replicas: PositiveInt = Field(1, description="Servers of a teacher at path.")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    gpus: PositiveFloat = Field(1.0, description="GPUs of each rank of it; a fraction shares the card.")
    timeout_s: PositiveFloat = Field(300.0, description="Seconds that one answer of it may take, a full queue there included.")

    @property
    def served(self) -> bool:
        """Whether the run starts servers for it."""
        return self.path is not None and self.path != POLICY


def _not_auto(value: object) -> object:
    """Reject `auto`, which earlier releases accepted."""
    if value == "auto":
        raise ValueError("must be true or false: auto is no longer supported; set true, or false to freeze the MTP layers in RL")
    return value


class RlConfig(Section):
    preset: Literal["grpo", "dapo", "dr_grpo", "reinforce++", "reinforce++_baseline", "gspo", "cispo", "sapo"] | None = Field(
        None, description="A published algorithm, whose values become the defaults of this section; keys that are given override them."
    )
    steps: NonNegativeInt = Field(0, description="Policy updates.")
    prompts_per_step: PositiveInt = Field(32, description="Prompts of an update, each with one group of responses.")
    group_size: PositiveInt = Field(8, description="Responses to each prompt (n).")
    minibatches: PositiveInt = Field(1, description="Optimizer steps of an update. Its groups are split over them; a group is not split.")
    train_mtp: Annotated[bool, BeforeValidator(_not_auto)] = Field(
        True, description="Train the MTP layers in RL, too; false: RL leaves them as they are."
    )
    loss: Loss = Field(
        "ppo",
        description="ppo: token ratio, clipped; gspo: sequence ratio; decoupled: PPO with a proximal policy of its own; cispo: the clipped "
        "ratio weighs each token's log-prob; sapo: a soft gate in place of the clip; or a loss of your own, FILE.py:NAME or MODULE:NAME.",
    )
    loss_args: dict[str, object] = Field(default_factory=dict, description="Keyword arguments of a loss of your own.")
    advantage: Advantage = Field(
        "grpo",
        description="Baseline and scale: of the group with its standard deviation (grpo), without (grpo_no_std, rloo); of the whole batch "
        "(reinforce_pp), or of the group and then scaled by the whole batch (reinforce_pp_baseline); or a user-defined function, "
        "FILE.py:NAME or MODULE:NAME.",
    )
    advantage_args: dict[str, object] = Field(default_factory=dict, description="Keyword arguments of a user-defined advantage.")
    aggregate: Literal["token", "sequence", "constant"] = Field(
        "token",
        description="token: mean over all tokens (DAPO); sequence: mean over trajectories of their means; constant: sum over all tokens, "
        "divided by trajectories × rollout.max_tokens (Dr. GRPO).",
    )
    old_logprobs: Literal["auto", "recompute", "behaviour"] = Field(
        "auto",
        description="Log-probs that the ratio is taken against. behaviour: the engine's own, so that the clip bounds stale samples, too; "
        "recompute: Megatron's, computed by the trainer at the update or by the log-prob server; auto: behaviour where samples can be "
        "stale, recompute on policy and where a log-prob server, a correction or loss: decoupled needs it.",
    )
    clip_low: PositiveFloat = Field(0.2, description="The ratio is clipped at 1 less this; 1: not at all, with loss: cispo.")
    clip_high: PositiveFloat = Field(0.28, description="The ratio is clipped at 1 plus this (clip-higher).")
    clip_dual: NonNegativeFloat = Field(0.0, description="Bound of the ratio for negative advantages (dual clip); 0: none.")
    tau_pos: PositiveFloat = Field(1.0, description="Temperature of SAPO's gate where the advantage is positive.")
    tau_neg: PositiveFloat = Field(1.05, description="The same where it is not; above tau_pos, such tokens are let go sooner.")
    entropy_coef: Float = Field(0.0, description="Weight of the entropy bonus.")
    kl_coef: NonNegativeFloat = Field(0.0, description="Weight of the KL penalty to the reference policy, the model before RL.")
    kl_estimator: Literal["k2", "k3"] = Field("k3", description="Estimator of that KL from samples; GRPO uses k3.")
    dynamic_sampling: bool = Field(True, description="Groups whose rewards are all equal are replaced by fresh ones.")
    overlong: OverlongConfig = Field(default_factory=OverlongConfig)
    teacher: TeacherConfig | None = Field(None, description="A model whose log-probs of the policy's own tokens it learns from.")
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)

    @model_validator(mode="before")
    @classmethod
    def _preset_defaults(cls, data: object) -> object:
        """Fill in what the preset says and the recipe does not."""
        if not isinstance(data, dict) or data.get("preset") not in PRESETS:
            return data
        return laid_over(PRESETS[data["preset"]], data)


def correction_fits(correction: CorrectionConfig) -> Complaints:
    """Refuse bounds between which no ratio lies."""
    if correction.mode in ("clip", "mask") and correction.low >= correction.high:
        yield f"train.rl.correction.low: must be below high: {correction.high}, got {correction.low}"


def clips_fit(rl: RlConfig) -> Complaints:
    """Refuse clips that would clip every ratio, or none."""
    if rl.clip_low > 1 or (rl.clip_low == 1 and rl.loss != "cispo"):
        limit = "at most 1" if rl.loss == "cispo" else "below 1"
        yield f"train.rl.clip_low: must be {limit}, got {rl.clip_low}"
    if 0 < rl.clip_dual <= 1:
        yield f"train.rl.clip_dual: must be above 1, or 0 for none, got {rl.clip_dual}"
    if rl.clip_dual and rl.loss in ("cispo", "sapo"):
        yield f"train.rl.clip_dual: loss: {rl.loss} has no dual clip; set it to 0"


def teacher_fits(rl: RlConfig) -> Complaints:
    """Refuse a teacher that is nowhere or in two places, and losses that give all tokens of a response one advantage."""
    teacher = rl.teacher
    if teacher is None:
        return
    if (teacher.path is None) == (teacher.url is None):
        yield "train.rl.teacher: give one of path and url"
    if teacher.url is not None and not teacher.url.startswith(("http://", "https://")):
        yield f"train.rl.teacher.url: must begin with http:// or https://, got {teacher.url}"
    if teacher.path == POLICY and teacher.hint is None:
        yield "train.rl.teacher.hint: a policy that reads the same prompt teaches itself nothing; give it a hint"
    if rl.loss == "gspo" and not teacher.topk:
        yield "train.rl.loss: gspo weighs a response as a whole, and a teacher each of its tokens; set ppo, or train.rl.teacher.topk"


def loss_fits(rl: RlConfig) -> Complaints:
    """Refuse arguments of a built-in loss or advantage, and groups without a baseline or without a chance to differ."""
    if rl.loss_args and not is_reference(rl.loss):
        yield f"train.rl.loss_args: loss: {rl.loss} takes none; leave them out, or name a loss of your own as FILE.py:NAME"
    if rl.advantage_args and not is_reference(rl.advantage):
        yield f"train.rl.advantage_args: advantage: {rl.advantage} takes none; remove them, or name a function as FILE.py:NAME"
    if rl.group_size > 1:
        return
    if rl.advantage in ADVANTAGES and rl.advantage != "reinforce_pp":
        yield f"train.rl.group_size: the {rl.advantage} baseline needs at least 2 responses a prompt, got {rl.group_size}"
    elif rl.dynamic_sampling:
        yield "train.rl.dynamic_sampling: replaces every group of group_size: 1, whose rewards cannot differ; set it to false"
