"""What a recipe may say and is known to learn badly: told before a run starts, and not refused.

Each caution begins with the field and ends with the mend, as complaints do. docs/async-tuning.md shows what they rest on.
"""

from __future__ import annotations

from collections.abc import Iterator

from mtpctl.recipe.schema import Recipe


def cautions_of(recipe: Recipe) -> Iterator[str]:
    """One line each; nothing for a recipe without RL."""
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
