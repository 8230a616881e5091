"""Settings that a recipe may have and that are known to learn badly: a run warns of them before it starts.

Each caution begins with the recipe field and ends with what to set instead. docs/async-tuning.md has the measurements behind them.
"""

from __future__ import annotations

from collections.abc import Iterator

from mtpctl.recipe.schema import Recipe


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
