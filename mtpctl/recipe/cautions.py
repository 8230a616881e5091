"""Settings that a recipe may have and that are known to learn badly: a run warns of them before it starts.

Each caution begins with the recipe field and ends with what to set instead. docs/async-tuning.md has the measurements behind them.
"""

from __future__ import annotations

from collections.abc import Iterator

from mtpctl.recipe.presets import PRESETS
from mtpctl.recipe.rl import RlConfig
from mtpctl.recipe.schema import Recipe

WIDEST_SEQUENCE_CLIP = 0.05
"""A response's mean ratio hardly ever leaves such a band: GSPO's paper clips at 3e-4 and 4e-4."""


def cautions_of(recipe: Recipe) -> Iterator[str]:
    """Yield the cautions about a recipe, one line each; a recipe without RL has none."""
    if "rl" not in recipe.train.stages:
        return
    rl, correction = recipe.train.rl, recipe.train.rl.correction
    uncorrected = correction.mode == "off" and rl.loss != "decoupled"
    if recipe.off_policy and recipe.old_logprobs == "recompute" and not recipe.logprob.standalone and uncorrected:
        yield (
            "train.rl.old_logprobs: recompute, with correction.mode: off, trains on stale samples as if they were new, and the reward "
            "oscillates; leave it at auto, or set train.rl.correction.mode: truncate"
        )
    if recipe.off_policy and rl.loss == "decoupled" and correction.mode == "off":
        yield (
            "train.rl.correction.mode: off leaves the importance weights of loss: decoupled without a bound, and one stale token can "
            "outweigh a batch; set it to truncate"
        )
    yield from _objective(rl)


def _objective(rl: RlConfig) -> Iterator[str]:
    """Losses and advantages in settings that defeat them."""
    if rl.loss == "gspo" and rl.clip_high > WIDEST_SEQUENCE_CLIP:
        yield (
            f"train.rl.clip_high: {rl.clip_high:g} clips next to nothing with loss: gspo, whose ratio is a mean over the response; "
            "set 4e-4 and clip_low: 3e-4, or preset: gspo"
        )
    if rl.advantage == "reinforce_pp" and rl.dynamic_sampling:
        yield (
            "train.rl.dynamic_sampling: drops groups of equal rewards, from which advantage: reinforce_pp learns, and shifts its baseline; "
            "set it to false"
        )
    for name in ("loss", "advantage", "aggregate"):
        if rl.preset is not None and (said := PRESETS[rl.preset][name]) != (given := getattr(rl, name)):
            yield f"train.rl.{name}: {given} overrides {said} of preset: {rl.preset}; leave one of them out"
