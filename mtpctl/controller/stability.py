"""Detects unstable learning: compares the variance of the unfiltered reward with the variance that sampling explains.

Sampling gives the mean reward of an update's groups a variance of s² = (variance of a group's mean) / groups. A parabola is fitted to these
means over a window of updates, and its residuals are compared with s²:

    stability = min(1, mean s² / (Σ residual² / (n - 3)))      1: sampling explains the residuals; near 0: something else moves the reward

If samples are stale and not corrected, the reward overshoots and turns back. In such an oscillation, residuals half a period apart have
opposite signs, so a negative autocorrelation at some lag distinguishes it from noise.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mtpctl.recipe.schema import Recipe

WINDOW = 20
"""Updates in the window: two periods of the oscillation that occurs with samples one update old."""
MIN_UPDATES = 14
SWING_STABILITY = 0.4
SWING_CORRELATION = 0.3
SWING_ERRORS = 3.0
FALL_WINDOW = 8
FALL_ERRORS = 4.0
MIN_FALL = 0.08
"""Minimum drop that is reported, of the mean reward over `FALL_WINDOW` updates below the best such mean.

Smaller drops may be due to the data.
"""
ENTROPY_GROWTH = 3.0


@dataclass(frozen=True, slots=True)
class Update:
    """Statistics of one update: the mean unfiltered reward of its groups, the squared standard error of that mean, and the entropy."""

    mean: float
    error2: float
    entropy: float | None


def observe(group_means: Sequence[float], entropy: float | None) -> Update | None:
    """The `Update` of an update from the mean rewards of its groups; None for fewer than two groups."""
    if len(group_means) < 2:
        return None
    return Update(statistics.fmean(group_means), statistics.variance(group_means) / len(group_means), entropy)


def residuals(values: Sequence[float]) -> list[float]:
    """The residuals of equally spaced values from a parabola that is fitted by least squares."""
    x = np.linspace(-1, 1, len(values))
    differences: list[float] = (np.asarray(values) - np.polyval(np.polyfit(x, values, 2), x)).tolist()
    return differences


def autocorrelation(values: Sequence[float], lag: int) -> float:
    """Autocorrelation at `lag` of values whose mean is 0: the mean product of pairs over the mean square."""
    square = statistics.fmean(v * v for v in values)
    products = [a * b for a, b in zip(values, values[lag:], strict=False)]
    return statistics.fmean(products) / square if square else 0.0


def stability(updates: Sequence[Update]) -> float:
    """The stability as defined in the module docstring, from 0 to 1; 1 if all mean rewards are equal."""
    means = [u.mean for u in updates]
    if min(means) == max(means):
        return 1.0
    # A parabola takes three degrees of freedom.
    residual2 = sum(r * r for r in residuals(means)) / (len(means) - 3)
    expected = statistics.fmean(u.error2 for u in updates)
    return min(1.0, expected / residual2) if residual2 > 0 else 1.0


def swings(updates: Sequence[Update]) -> bool:
    """Whether the reward of a run of low stability oscillates: it drops, and residuals half a period apart have opposite signs.

    A run that learns within a few updates does not follow a parabola either, but its reward does not drop.
    """
    if not has_dropped(updates):
        return False
    errors = residuals([u.mean for u in updates])
    return min(autocorrelation(errors, lag) for lag in range(2, len(errors) // 2 + 1)) < -SWING_CORRELATION


def has_dropped(updates: Sequence[Update]) -> bool:
    """Whether the mean of two consecutive updates fell below the best earlier one by more than sampling explains."""
    pairs = [(a.mean + b.mean) / 2 for a, b in itertools.pairwise(updates)]
    drops = [best - value for best, value in zip(itertools.accumulate(pairs, max), pairs, strict=True)]
    return max(drops) > SWING_ERRORS * statistics.fmean(u.error2 for u in updates) ** 0.5


def fall(updates: Sequence[Update]) -> float:
    """How far the mean reward of the last `FALL_WINDOW` updates is below the best such mean; 0 if sampling may explain it."""
    if len(updates) < 2 * FALL_WINDOW:
        return 0.0
    windows = [updates[i : i + FALL_WINDOW] for i in range(len(updates) - FALL_WINDOW + 1)]
    means = [statistics.fmean(u.mean for u in window) for window in windows]
    latest, best = means[-1], max(means)
    error = (2 * statistics.fmean(u.error2 for u in updates) / FALL_WINDOW) ** 0.5
    return best - latest if best - latest > max(MIN_FALL, FALL_ERRORS * error) else 0.0


class StabilityWatch:
    """Watches all updates of a run: computes `rl/stability`, and warns at most once per window, with the recipe keys to change."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._updates: deque[Update] = deque(maxlen=4 * WINDOW)
        self._quiet = 0

    def update(self, group_means: Sequence[float], metrics: dict[str, float]) -> tuple[dict[str, float], str | None]:
        """Returns metrics to log with the update, and a warning if any. `group_means`: rewards of all groups, dropped ones included."""
        if (update := observe(group_means, metrics.get("actor/entropy"))) is None:
            return {}, None
        self._updates.append(update)
        self._quiet = max(0, self._quiet - 1)
        latest = list(self._updates)[-WINDOW:]
        if len(latest) < MIN_UPDATES:
            return {}, None
        value = stability(latest)
        warning = None if self._quiet else self._warning(latest, value, metrics)
        if warning is not None:
            self._quiet = WINDOW
        return {"rl/stability": value}, warning

    def _warning(self, latest: list[Update], value: float, metrics: dict[str, float]) -> str | None:
        if value < SWING_STABILITY and swings(latest):
            low, high = min(u.mean for u in latest), max(u.mean for u in latest)
            problem = f"the reward swings between {low:.2f} and {high:.2f} over {len(latest)} updates (rl/stability {value:.2f})"
        elif drop := fall(list(self._updates)):
            problem = f"the reward has fallen by {drop:.2f} under the best of its last {len(self._updates)} updates"
        elif grown := self._entropy_growth():
            problem = f"the policy's entropy has grown {grown:.1f} times in {len(self._updates)} updates"
        else:
            return None
        staleness = metrics.get("async/staleness_mean", 0.0)
        return f"{problem}; samples are {staleness:.1f} versions old in the mean: {self._fix(staleness)}"

    def _entropy_growth(self) -> float:
        entropies = [u.entropy for u in self._updates if u.entropy is not None]
        if len(entropies) < 2 * FALL_WINDOW:
            return 0.0
        early, late = statistics.fmean(entropies[:FALL_WINDOW]), statistics.fmean(entropies[-FALL_WINDOW:])
        return late / early if late > ENTROPY_GROWTH * early > 0 else 0.0

    def _fix(self, staleness: float) -> str:
        rl = self._recipe.rl
        uncorrected = self._recipe.old_logprobs == "recompute" and rl.correction.mode == "off"
        if self._recipe.off_policy and uncorrected:
            return "leave train.rl.old_logprobs at auto, or set train.rl.correction.mode: truncate"
        if staleness >= 1:
            return "lower async.staleness_threshold, or train.rl.optimizer.lr"
        return "lower train.rl.optimizer.lr, or raise train.rl.prompts_per_step"
