"""The section `train.rl`: the policy update, its loss, advantages and off-policy correction."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from mtpctl.families.reading import shape_of
from mtpctl.recipe.model import ModelConfig, hf_config
from mtpctl.recipe.section import (
    Complaints,
    Float,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    ParallelConfig,
    PositiveFloat,
    PositiveInt,
    Section,
    check_parallel,
)
from mtpctl.user_code import is_code_reference

if TYPE_CHECKING:
    from mtpctl.recipe.schema import Recipe


class OptimizerConfig(Section):
    """The sections `train.rl.optimizer` and, with other defaults, `train.sft.optimizer` and `train.draft.optimizer`."""

    lr: PositiveFloat = Field(1e-6, description="Peak learning rate.")
    mtp_lr: PositiveFloat | None = Field(None, description="Peak learning rate of the MTP layers; default: lr.")
    betas: tuple[Float, Float] = Field((0.9, 0.95), description="Adam's decay rates.")
    eps: PositiveFloat = Field(1e-8, description="Adam's epsilon.")
    weight_decay: NonNegativeFloat = Field(0.0, description="Decoupled weight decay.")
    warmup_steps: NonNegativeInt = Field(0, description="Linear warm-up from zero, in optimizer steps (`minibatches` per RL update).")
    min_lr_ratio: Fraction = Field(1.0, description="Cosine decay to this fraction of the peak; 1: constant.")
    clip_grad: NonNegativeFloat = Field(1.0, description="Maximum gradient norm of the trunk; 0: no clipping.")


class SftOptimizerConfig(OptimizerConfig):
    lr: PositiveFloat = Field(1e-5, description="Peak learning rate.")


class DraftOptimizerConfig(OptimizerConfig):
    lr: PositiveFloat = Field(1e-3, description="Peak learning rate.")
    warmup_steps: NonNegativeInt = Field(10, description="Linear warm-up from zero, in updates.")
    min_lr_ratio: Fraction = Field(0.1, description="Cosine decay to this fraction of the peak; 1: constant.")


LOSSES = ("ppo", "gspo", "decoupled", "cispo", "sapo")
"""Built-in losses."""
ADVANTAGES = ("grpo", "grpo_no_std", "rloo", "reinforce_pp", "reinforce_pp_baseline")
"""Built-in advantages."""


def _built_in_or_user_defined(names: tuple[str, ...]) -> AfterValidator:
    def check(value: str) -> str:
        if value in names:
            return value
        if not is_code_reference(value):
            matches = difflib.get_close_matches(value, names, 1)
            hint = f"; did you mean {matches[0]}?" if matches else ""
            raise ValueError(f"must be {', '.join(names)}, or FILE.py:NAME or MODULE:NAME, got {value!r}{hint}")
        return os.path.expanduser(value)

    return AfterValidator(check)


Loss = Annotated[str, _built_in_or_user_defined(LOSSES)]
Advantage = Annotated[str, _built_in_or_user_defined(ADVANTAGES)]


class OverlongConfig(Section):
    enabled: bool = Field(False, description="Penalize responses near the length limit (DAPO's soft overlong punishment).")
    buffer: PositiveInt = Field(64, description="Tokens before the limit over which the penalty grows.")
    penalty: NonNegativeFloat = Field(1.0, description="Penalty at the limit.")


class CorrectionConfig(Section):
    """Off-policy correction by the ratio of old to behavior probabilities."""

    mode: Literal["auto", "off", "truncate", "clip", "mask"] = Field(
        "auto",
        description="truncate: weights capped above (TIS); clip: clipped on both sides; mask: tokens outside the band dropped (MIS, "
        "IcePop); auto: truncate with rollout.quantization: fp8, unless old_logprobs is behaviour; otherwise off.",
    )
    level: Literal["token", "sequence"] = Field("token", description="Ratio per token, or per response.")
    low: NonNegativeFloat = Field(0.0, description="Lower bound of the ratio; not with mode: truncate.")
    high: PositiveFloat = Field(2.0, description="Upper bound of the ratio.")


POLICY = "policy"
"""`train.rl.teacher.path` if the policy is its own teacher."""
MAX_CANDIDATES = 32
"""Maximum number of teacher candidates per position."""


class TeacherConfig(Section):
    """On-policy distillation: the policy learns from a teacher's log-probs of the responses that the policy sampled."""

    path: str | None = Field(
        None,
        description="Model folder or hub id of a teacher that the run serves; policy: the policy itself, on the run's log-prob server, "
        "with the hint in its prompts.",
    )
    url: str | None = Field(None, description="URL of a log-prob server that serves the teacher (mtpctl logprob-serve).")
    kl: Literal["reverse", "forward"] = Field(
        "reverse",
        description="reverse: KL(policy ‖ teacher), which is mode-seeking; forward: KL(teacher ‖ policy), which is mode-covering.",
    )
    topk: Annotated[int, Field(ge=0, le=MAX_CANDIDATES)] = Field(
        0,
        description="Number of the teacher's most likely tokens over which the KL is computed at each position; all others count as one. "
        "0: the KL is estimated from the sampled token.",
    )
    coef: PositiveFloat = Field(1.0, description="Weight of the KL in the loss; with topk: 0, of its estimate in the advantages.")
    rewards: bool = Field(True, description="Also train on rewards; false: only on the teacher.")
    hint: str | None = Field(
        None,
        description="Template of the teacher's prompt, such as '{prompt} (the answer is {answer})'. It may contain {prompt}, {answer}, "
        "{solution} and the row's other columns.",
    )
    replicas: PositiveInt = Field(1, description="Servers of the teacher at path.")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    gpus: PositiveFloat = Field(1.0, description="GPUs per rank; a fraction shares the GPU.")
    timeout_s: PositiveFloat = Field(300.0, description="Timeout of a request to the teacher in seconds, its queue included.")

    @property
    def runs_server(self) -> bool:
        return self.path is not None and self.path != POLICY


class RlConfig(Section):
    preset: Literal["grpo", "dapo", "dr_grpo", "reinforce++", "reinforce++_baseline", "gspo", "cispo", "sapo"] | None = Field(
        None, description="A published algorithm, whose values become the defaults of this section."
    )
    steps: NonNegativeInt = Field(0, description="Policy updates.")
    prompts_per_step: PositiveInt = Field(32, description="Prompts per update, each with one group of responses.")
    group_size: PositiveInt = Field(8, description="Responses per prompt (n).")
    minibatches: PositiveInt = Field(1, description="Optimizer steps per update, over which its groups are split.")
    train_mtp: bool = Field(True, description="Also train the MTP layers in RL; false: they are frozen.")
    loss: Loss = Field(
        "ppo",
        description="ppo: clipped token ratio; gspo: sequence ratio; decoupled: PPO with a separate proximal policy; cispo: the clipped "
        "ratio weights each token's log-prob; sapo: a soft gate instead of the clip; or your own loss, FILE.py:NAME or MODULE:NAME.",
    )
    loss_args: dict[str, object] = Field(default_factory=dict, description="Keyword arguments of your own loss.")
    advantage: Advantage = Field(
        "grpo",
        description="grpo: group baseline, scaled by the group's standard deviation; grpo_no_std, rloo: group baseline, unscaled; "
        "reinforce_pp: batch baseline and scale; reinforce_pp_baseline: group baseline, batch scale; or your own function, "
        "FILE.py:NAME or MODULE:NAME.",
    )
    advantage_args: dict[str, object] = Field(default_factory=dict, description="Keyword arguments of your own advantage.")
    aggregate: Literal["token", "sequence", "constant"] = Field(
        "token",
        description="token: mean over all tokens (DAPO); sequence: mean over trajectories of their token means; constant: sum over tokens, "
        "divided by trajectories × rollout.max_tokens (Dr. GRPO).",
    )
    old_logprobs: Literal["auto", "recompute", "behaviour"] = Field(
        "auto",
        description="Denominator of the ratio. behaviour: the engine's log-probs, so the clip also bounds stale samples; recompute: "
        "Megatron's, computed by the trainer at the update or by the log-prob server; auto: recompute on policy, or with a "
        "log-prob server, a correction or loss: decoupled; otherwise behaviour.",
    )
    clip_low: PositiveFloat = Field(0.2, description="The ratio is clipped at 1 - clip_low; 1: no lower clip (loss: cispo).")
    clip_high: PositiveFloat = Field(0.28, description="The ratio is clipped at 1 + clip_high (clip-higher).")
    clip_dual: NonNegativeFloat = Field(0.0, description="Maximum ratio for negative advantages (dual clip); 0: none.")
    tau_pos: PositiveFloat = Field(1.0, description="Temperature of SAPO's gate for positive advantages.")
    tau_neg: PositiveFloat = Field(
        1.05, description="Temperature of SAPO's gate for other advantages; above tau_pos, their gradients decay faster."
    )
    entropy_coef: Float = Field(0.0, description="Weight of the entropy bonus.")
    kl_coef: NonNegativeFloat = Field(0.0, description="Weight of the KL penalty against the reference policy, the model before RL.")
    kl_estimator: Literal["k2", "k3"] = Field("k3", description="Estimator of the KL penalty; GRPO uses k3.")
    dynamic_sampling: bool = Field(True, description="Replace groups whose rewards are all equal by new ones.")
    signal_backoff: bool = Field(False, description="After z consecutive groups without signal, skip a prompt for min(2^z - 1, 15) epochs.")
    overlong: OverlongConfig = Field(default_factory=OverlongConfig)
    teacher: TeacherConfig | None = Field(None, description="Teacher model of on-policy distillation.")
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)

    @model_validator(mode="before")
    @classmethod
    def _preset_defaults(cls, data: object) -> object:
        """Use the preset's values for keys that are not set."""
        if not isinstance(data, dict) or data.get("preset") not in PRESETS:
            return data
        return with_preset(PRESETS[data["preset"]], data)


def check_correction(correction: CorrectionConfig) -> Complaints:
    """Report bounds that exclude every ratio."""
    if correction.mode in ("clip", "mask") and correction.low >= correction.high:
        yield f"train.rl.correction.low: must be below high: {correction.high}, got {correction.low}"


def check_clips(rl: RlConfig) -> Complaints:
    """Report clips that would clip every ratio or none, and a dual clip that the loss does not use."""
    if rl.clip_low > 1 or (rl.clip_low == 1 and rl.loss != "cispo"):
        limit = "at most 1" if rl.loss == "cispo" else "below 1"
        yield f"train.rl.clip_low: must be {limit}, got {rl.clip_low}"
    if 0 < rl.clip_dual <= 1:
        yield f"train.rl.clip_dual: must be above 1, or 0 for none, got {rl.clip_dual}"
    if rl.clip_dual and rl.loss in ("cispo", "sapo"):
        yield f"train.rl.clip_dual: loss: {rl.loss} has no dual clip; set it to 0"


def check_teacher(rl: RlConfig) -> Complaints:
    """Report a teacher without an address or with two, the policy as teacher without a hint, and gspo with topk: 0."""
    teacher = rl.teacher
    if teacher is None:
        return
    if (teacher.path is None) == (teacher.url is None):
        yield "train.rl.teacher: set exactly one of path and url"
    if teacher.url is not None and not teacher.url.startswith(("http://", "https://")):
        yield f"train.rl.teacher.url: must begin with http:// or https://, got {teacher.url}"
    if teacher.path == POLICY and teacher.hint is None:
        yield "train.rl.teacher.hint: a policy learns nothing from itself with the same prompt; set a hint"
    if rl.loss == "gspo" and not teacher.topk:
        yield "train.rl.loss: gspo weights whole responses, but a teacher with topk: 0 single tokens; set loss: ppo, or a topk above 0"


def check_teacher_in_run(recipe: Recipe) -> Complaints:
    """Report a teacher that the rest of the run does not support."""
    teacher = recipe.train.rl.teacher
    if teacher is None:
        return
    if teacher.path == POLICY and not recipe.logprob.standalone:
        yield "train.rl.teacher.path: policy needs the run's log-prob server; set logprob.standalone: true"
    if recipe.served_teacher is not None:
        config = hf_config(ModelConfig(path=teacher.path), fetch=False, field="train.rl.teacher.path")
        if config is not None:
            yield from check_parallel(teacher.parallel, shape_of(config), "train.rl.teacher.parallel")
    if teacher.topk and recipe.train.parallel.cp > 1:
        yield "train.rl.teacher.topk: needs whole responses on each rank; set train.parallel.cp: 1, or topk: 0"
    if teacher.hint is not None and recipe.rollout.uses_agents:
        yield "train.rl.teacher.hint: an agent writes its own prompts, which have no hint; leave it out"


def check_objective(recipe: Recipe) -> Complaints:
    """Report settings that contradict each other.

    These are top_p or top_k without a correction; old_logprobs: behaviour with a log-prob server, a correction or loss: decoupled; and an
    overlong buffer as long as a response.
    """
    rl, rollout = recipe.rl, recipe.rollout
    correction = rl.correction
    if (rollout.top_p < 1 or rollout.top_k) and correction.mode == "off" and "rl" in recipe.train.stages:
        field, value = ("top_p", rollout.top_p) if rollout.top_p < 1 else ("top_k", rollout.top_k)
        yield (
            f"rollout.{field}: {value} renormalizes the sampling distribution, so the trainer cannot match its log-probs; "
            f"set it to {1 if field == 'top_p' else 0}, or train.rl.correction.mode: truncate"
        )
    if rl.old_logprobs == "behaviour":
        if recipe.logprob.standalone:
            yield "train.rl.old_logprobs: behaviour leaves the log-prob servers without work; set auto, or logprob.standalone: false"
        if correction.mode != "off":
            yield "train.rl.correction.mode: old_logprobs: behaviour leaves nothing to correct; set mode: off, or old_logprobs: auto"
        if rl.loss == "decoupled":
            yield "train.rl.loss: decoupled needs a proximal policy other than the behavior policy; set train.rl.old_logprobs: auto"
    if rl.overlong.enabled and rl.overlong.buffer >= rollout.max_tokens:
        yield f"train.rl.overlong.buffer: must be below rollout.max_tokens: {rollout.max_tokens}, got {rl.overlong.buffer}"


def check_loss(rl: RlConfig) -> Complaints:
    """Report arguments for built-in losses and advantages, which take none, conflicts with `signal_backoff`, and too small groups.

    The baseline and dynamic sampling need at least two responses per group.
    """
    if rl.loss_args and not is_code_reference(rl.loss):
        yield f"train.rl.loss_args: loss: {rl.loss} takes none; leave them out, or name your own loss as FILE.py:NAME"
    if rl.advantage_args and not is_code_reference(rl.advantage):
        yield f"train.rl.advantage_args: advantage: {rl.advantage} takes none; remove them, or name a function as FILE.py:NAME"
    if rl.signal_backoff and rl.teacher is not None:
        yield "train.rl.signal_backoff: a teacher trains on groups without signal as well; set it to false"
    if rl.signal_backoff and not rl.dynamic_sampling:
        yield "train.rl.signal_backoff: needs dynamic_sampling: true; without it, groups without signal are trained on as well"
    if rl.group_size > 1:
        return
    if rl.advantage in ADVANTAGES and rl.advantage != "reinforce_pp":
        yield f"train.rl.group_size: the {rl.advantage} baseline needs at least 2 responses per prompt, got {rl.group_size}"
    elif rl.dynamic_sampling:
        yield "train.rl.dynamic_sampling: replaces every group of group_size: 1, whose rewards cannot differ; set it to false"


def _preset(
    loss: str, advantage: str, aggregate: str, *, clip: tuple[float, float] | None = (0.2, 0.2), **others: object
) -> dict[str, object]:
    clips = {} if clip is None else {"clip_low": clip[0], "clip_high": clip[1]}
    return {"loss": loss, "advantage": advantage, "aggregate": aggregate, **clips, "dynamic_sampling": False, **others}


_DAPO: dict[str, Any] = {"dynamic_sampling": True, "overlong": {"enabled": True}}

# Presets set the loss, advantage, aggregation, clips and sampling of published algorithms (papers and formulas: docs/objectives.md).
# Sizes, steps and learning rates depend on the model and are not part of a preset.
PRESETS: dict[str, dict[str, object]] = {
    # DeepSeekMath (arXiv 2402.03300).
    "grpo": _preset("ppo", "grpo", "sequence", kl_coef=0.04, kl_estimator="k3"),
    # arXiv 2503.14476.
    "dapo": _preset("ppo", "grpo", "token", clip=(0.2, 0.28), kl_coef=0.0, **_DAPO),
    # arXiv 2503.20783.
    "dr_grpo": _preset("ppo", "grpo_no_std", "constant", kl_coef=0.0),
    # arXiv 2501.03262. The KL penalty is the k2 loss in both variants; it is off unless the user sets its weight, kl_coef.
    "reinforce++": _preset("ppo", "reinforce_pp", "token", kl_estimator="k2"),
    "reinforce++_baseline": _preset("ppo", "reinforce_pp_baseline", "token", kl_estimator="k2"),
    # arXiv 2507.18071.
    "gspo": _preset("gspo", "grpo", "sequence", clip=(3e-4, 4e-4), kl_coef=0.0),
    # MiniMax-M1 (arXiv 2506.13585) clips the weight only above and does not publish the bound. ScaleRL (arXiv 2510.13786) uses 5.
    "cispo": _preset("cispo", "grpo", "token", clip=(1.0, 4.0), kl_coef=0.0, **_DAPO),
    # arXiv 2511.20347.
    "sapo": _preset("sapo", "grpo", "sequence", clip=None, tau_pos=1.0, tau_neg=1.05, kl_coef=0.0),
}


def with_preset(preset: Mapping[str, object], section: Mapping[str, object]) -> dict[str, object]:
    """A section with the preset's values for keys that it does not set, in nested mappings too."""
    merged = dict(section)
    for name, value in preset.items():
        if name not in section:
            merged[name] = dict(value) if isinstance(value, Mapping) else value
        elif isinstance(value, Mapping) and isinstance(nested := section[name], Mapping):
            merged[name] = with_preset(value, nested)
    return merged
