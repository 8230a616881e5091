"""All checks of a recipe: errors, and cautions about valid settings that train badly or have no effect.

Each check is in the module of its section. It yields one line per mistake, which begins with the recipe field and ends with the fix. No
check starts a process, contacts the network or looks for a device.
"""

from __future__ import annotations

from collections.abc import Iterator

from mtpctl.errors import UserError, with_notes
from mtpctl.families.reading import shape_of
from mtpctl.families.shape import ModelShape
from mtpctl.recipe import data, model, numerics, reward, rl, rollout, schema, sync, train
from mtpctl.recipe.fields import find_secrets
from mtpctl.recipe.rl import PRESETS
from mtpctl.recipe.schema import Recipe
from mtpctl.recipe.section import Complaints, check_parallel

MAX_SEQUENCE_CLIP = 0.05
"""Largest useful clip of GSPO: a response's mean ratio rarely leaves a band this wide. The paper clips at 3e-4 and 4e-4."""


def validate(recipe: Recipe) -> None:
    """Raise UserError for the first mistake; its notes report mistakes in other fields."""
    complaints: dict[str, str] = {}
    for text in list_complaints(recipe):
        complaints.setdefault(text.split(":", 1)[0], text)
    if complaints:
        raise with_notes([UserError(text) for text in complaints.values()])


def list_complaints(recipe: Recipe) -> Complaints:
    """All mistakes, one line each. Raises UserError if the model cannot be read."""
    yield from (text for _, text in find_secrets(recipe.model_dump(mode="json", by_alias=True)))
    config = model.hf_config(recipe.model, fetch=False)
    shape = shape_of(config) if config is not None else None
    yield from _sections(recipe)
    if shape is not None:
        yield from _sections_of_model(recipe, shape)
    yield from model.check_byte_tokenizer(recipe.model, shape)
    yield from model.check_mtp(recipe, shape)
    yield from reward.check_answers(recipe)
    yield from rl.check_objective(recipe)
    yield from sync.check_transport(recipe)
    yield from sync.check_kv(recipe)
    yield from sync.check_adapter_sync(recipe, shape)
    yield from sync.check_live_weights(recipe, config or {})
    yield from numerics.check_fp8_rollout(recipe, shape, config or {})
    yield from train.check_replay(recipe)
    yield from schema.check_kernels(recipe)
    yield from numerics.check_numerics(recipe, shape)
    yield from rollout.check_engine_device(recipe)
    yield from rollout.check_on_trainer_gpus(recipe)
    yield from schema.check_deterministic(recipe)
    if shape is not None:
        yield from rollout.check_served(recipe, config or {}, shape)


def _sections(recipe: Recipe) -> Complaints:
    """Mistakes within single sections."""
    section = recipe.rollout
    yield from model.check_model(recipe.model)
    yield from train.check_train(recipe.train)
    yield from rl.check_correction(recipe.train.rl.correction)
    yield from rl.check_clips(recipe.train.rl)
    yield from rl.check_teacher(recipe.train.rl)
    yield from rl.check_teacher_in_run(recipe)
    if "rl" in recipe.train.stages:
        yield from rl.check_loss(recipe.train.rl)
    yield from rollout.check_replicas(section)
    yield from rollout.check_speculation(section)
    yield from rollout.check_environment(section)
    yield from rollout.check_agents(section)
    yield from section.check_engine()
    yield from sync.check_sections(recipe.sync)
    yield from data.check_data(recipe.data, environment_has_tasks=section.verifiers is not None)
    yield from data.check_evaluation(recipe.evaluation, recipe.data, section)
    yield from reward.check_reward(recipe.reward, recipe.data.checker)
    yield from schema.check_address(recipe.cluster)
    yield from schema.check_run_dir(recipe)
    yield from schema.check_urls(recipe)


def _sections_of_model(recipe: Recipe, shape: ModelShape) -> Complaints:
    """Mistakes of sections that do not fit the model's dimensions."""
    yield from rollout.check_lengths(recipe.rollout, shape)
    yield from rollout.check_tp(recipe.rollout.tp, shape)
    yield from check_parallel(recipe.train.parallel, shape, "train.parallel")
    if recipe.logprob.standalone:
        yield from check_parallel(recipe.logprob.parallel, shape, "logprob.parallel")
    yield from train.check_moe(recipe.train, shape)
    if recipe.train.lora is not None:
        yield from train.check_lora(recipe.train.lora, shape)


def cautions_of(recipe: Recipe) -> Iterator[str]:
    """Cautions about valid RL settings that train badly or have no effect, one line each; docs/async-tuning.md has measurements."""
    if "rl" not in recipe.train.stages:
        return
    yield from sync.sync_cautions(recipe)
    yield from numerics.quantization_cautions(recipe)
    section, correction = recipe.rl, recipe.rl.correction
    uncorrected = correction.mode == "off" and section.loss != "decoupled"
    if recipe.off_policy and recipe.old_logprobs == "recompute" and not recipe.logprob.standalone and uncorrected:
        yield (
            "train.rl.old_logprobs: recompute, with correction.mode: off, trains on stale samples as if they were on-policy, and the "
            "reward oscillates; leave it at auto, or set train.rl.correction.mode: truncate"
        )
    if recipe.off_policy and section.loss == "decoupled" and correction.mode == "off":
        yield (
            "train.rl.correction.mode: off leaves the importance weights of loss: decoupled unbounded, and one stale token can dominate a "
            "batch; set it to truncate"
        )
    if section.loss == "gspo" and section.clip_high > MAX_SEQUENCE_CLIP:
        yield (
            f"train.rl.clip_high: {section.clip_high:g} clips almost nothing with loss: gspo, whose ratio is a mean over the response; "
            "set 4e-4 and clip_low: 3e-4, or preset: gspo"
        )
    if section.advantage == "reinforce_pp" and section.dynamic_sampling:
        yield (
            "train.rl.dynamic_sampling: drops groups of equal rewards, from which advantage: reinforce_pp learns, and biases its baseline; "
            "set it to false"
        )
    for name in ("loss", "advantage", "aggregate"):
        if section.preset is not None and (default := PRESETS[section.preset][name]) != (value := getattr(section, name)):
            yield f"train.rl.{name}: {value} overrides {default} of preset: {section.preset}; leave one of them out"
