"""Warnings and hints during RL: problems that the metrics show, each with the recipe keys to change.

`StabilityWatch` detects unstable learning. It compares the variance of the unfiltered reward with the variance that sampling explains.

Sampling gives the mean reward of an update's groups a variance of s² = (variance of a group's mean) / groups. A parabola is fitted to these
means over a window of updates, and its residuals are compared with s²:

    stability = min(1, mean s² / (Σ residual² / (n - 3)))      1: sampling explains the residuals; near 0: something else moves the reward

If samples are stale and not corrected, the reward overshoots and turns back. In such an oscillation, residuals half a period apart have
opposite signs, so a negative autocorrelation at some lag distinguishes it from noise.

`HintWatch` detects other common problems. Hints use means over the latest updates, so a single update triggers none. A hint is reported
when its condition first holds, and again if it still holds `REPEAT_UPDATES` updates later. `IdleWatch` reports a long wait for samples
at the end of the stage.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mtpctl.recipe.schema import Recipe

WINDOW = 20
"""Updates over which a trend is measured: two periods of the oscillation that occurs with samples one update old.

The run in docs/benchmarks/first-run.md gains at least 5 points in this time.
"""
MIN_STABILITY_UPDATES = 14
OSCILLATION_MAX_STABILITY = 0.4
OSCILLATION_CORRELATION = 0.3
OSCILLATION_STANDARD_ERRORS = 3.0
DROP_WINDOW = 8
DROP_STANDARD_ERRORS = 4.0
MIN_DROP = 0.08
"""Minimum reported drop of the mean reward over the last `DROP_WINDOW` updates, relative to the best mean over as many updates.

Smaller drops may be due to the data.
"""
MIN_ENTROPY_GROWTH = 3.0


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """Statistics of one update: the mean unfiltered reward of its groups, the sampling variance of that mean, and the metrics."""

    reward: float
    variance: float
    metrics: Mapping[str, float]

    @classmethod
    def from_group_means(cls, group_means: Sequence[float], metrics: Mapping[str, float]) -> UpdateStats | None:
        """Statistics from the mean rewards of all groups, including dropped ones; None for fewer than two groups."""
        if len(group_means) < 2:
            return None
        return cls(statistics.fmean(group_means), statistics.variance(group_means) / len(group_means), dict(metrics))


def fit_residuals(values: Sequence[float]) -> list[float]:
    """The residuals of equally spaced values from a parabola that is fitted by least squares."""
    times = np.linspace(-1, 1, len(values))
    residuals: list[float] = (np.asarray(values) - np.polyval(np.polyfit(times, values, 2), times)).tolist()
    return residuals


def autocorrelation(values: Sequence[float], lag: int) -> float:
    """Autocorrelation at `lag` of values whose mean is 0: the mean product of pairs over the mean square."""
    mean_square = statistics.fmean(value * value for value in values)
    products = [a * b for a, b in zip(values, values[lag:], strict=False)]
    return statistics.fmean(products) / mean_square if mean_square else 0.0


def compute_stability(updates: Sequence[UpdateStats]) -> float:
    """The stability as defined in the module docstring, from 0 to 1; 1 if all mean rewards are equal."""
    means = [update.reward for update in updates]
    if min(means) == max(means):
        return 1.0
    # A parabola takes three degrees of freedom.
    residual_variance = sum(residual * residual for residual in fit_residuals(means)) / (len(means) - 3)
    sampling_variance = statistics.fmean(update.variance for update in updates)
    return min(1.0, sampling_variance / residual_variance) if residual_variance > 0 else 1.0


def oscillates(updates: Sequence[UpdateStats]) -> bool:
    """Whether the reward of updates with low stability oscillates: it drops, and residuals half a period apart have opposite signs.

    A run that learns within a few updates does not follow a parabola either, but its reward does not drop.
    """
    pair_means = [(a.reward + b.reward) / 2 for a, b in itertools.pairwise(updates)]
    drops = [best_mean - value for best_mean, value in zip(itertools.accumulate(pair_means, max), pair_means, strict=True)]
    standard_error = statistics.fmean(update.variance for update in updates) ** 0.5
    if max(drops) <= OSCILLATION_STANDARD_ERRORS * standard_error:  # sampling explains the drops
        return False
    residuals = fit_residuals([update.reward for update in updates])
    return min(autocorrelation(residuals, lag) for lag in range(2, len(residuals) // 2 + 1)) < -OSCILLATION_CORRELATION


def reward_drop(updates: Sequence[UpdateStats]) -> float:
    """How far the mean reward of the last `DROP_WINDOW` updates is below the best such mean; 0 if sampling may explain it."""
    if len(updates) < 2 * DROP_WINDOW:
        return 0.0
    windows = [updates[i : i + DROP_WINDOW] for i in range(len(updates) - DROP_WINDOW + 1)]
    means = [statistics.fmean(update.reward for update in window) for window in windows]
    latest_mean, best_mean = means[-1], max(means)
    standard_error = (2 * statistics.fmean(update.variance for update in updates) / DROP_WINDOW) ** 0.5
    return best_mean - latest_mean if best_mean - latest_mean > max(MIN_DROP, DROP_STANDARD_ERRORS * standard_error) else 0.0


class StabilityWatch:
    """Computes `rl/stability` after each update, and returns at most one warning per window, with the recipe keys to change."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._updates: deque[UpdateStats] = deque(maxlen=4 * WINDOW)
        self._updates_until_warning = 0

    def update(self, group_means: Sequence[float], metrics: dict[str, float]) -> tuple[dict[str, float], str | None]:
        """Returns metrics to log with the update, and a warning if any. `group_means`: rewards of all groups, dropped ones included."""
        if (update := UpdateStats.from_group_means(group_means, metrics)) is None:
            return {}, None
        self._updates.append(update)
        self._updates_until_warning = max(0, self._updates_until_warning - 1)
        latest = list(self._updates)[-WINDOW:]
        if len(latest) < MIN_STABILITY_UPDATES:
            return {}, None
        stability = compute_stability(latest)
        warning = None if self._updates_until_warning else self._warning(latest, stability, metrics)
        if warning is not None:
            self._updates_until_warning = WINDOW
        return {"rl/stability": stability}, warning

    def _warning(self, latest: list[UpdateStats], stability: float, metrics: dict[str, float]) -> str | None:
        if stability < OSCILLATION_MAX_STABILITY and oscillates(latest):
            low, high = min(update.reward for update in latest), max(update.reward for update in latest)
            problem = f"the reward swings between {low:.2f} and {high:.2f} over {len(latest)} updates (rl/stability {stability:.2f})"
        elif reward_fall := reward_drop(list(self._updates)):
            problem = f"the reward has fallen by {reward_fall:.2f} below the best of its last {len(self._updates)} updates"
        elif growth := self._entropy_growth():
            problem = f"the policy's entropy has grown {growth:.1f} times in {len(self._updates)} updates"
        else:
            return None
        staleness = metrics.get("async/staleness_mean", 0.0)
        return f"{problem}; samples are {staleness:.1f} versions old on average: {self._suggest_fix(staleness)}"

    def _entropy_growth(self) -> float:
        entropies = [update.metrics["actor/entropy"] for update in self._updates if "actor/entropy" in update.metrics]
        if len(entropies) < 2 * DROP_WINDOW:
            return 0.0
        early_mean, late_mean = statistics.fmean(entropies[:DROP_WINDOW]), statistics.fmean(entropies[-DROP_WINDOW:])
        return late_mean / early_mean if late_mean > MIN_ENTROPY_GROWTH * early_mean > 0 else 0.0

    def _suggest_fix(self, staleness: float) -> str:
        rl = self._recipe.rl
        uncorrected = self._recipe.old_logprobs == "recompute" and rl.correction.mode == "off"
        if self._recipe.off_policy and uncorrected:
            return "leave train.rl.old_logprobs at auto, or set train.rl.correction.mode: truncate"
        if staleness >= 1:
            return "lower async.staleness_threshold, or train.rl.optimizer.lr"
        return "lower train.rl.optimizer.lr, or raise train.rl.prompts_per_step"


RECENT_UPDATES = 5
"""Updates over which a level is averaged, such as the share of truncated responses."""
REPEAT_UPDATES = 100
"""Updates after which a hint is repeated if it still holds."""
RISE_STANDARD_ERRORS = 2.0
"""The reward has risen if the mean of the second half is above that of the first by more than this many standard errors."""
UNCHANGED_RATIO = 0.01
"""Distance of `actor/ratio_mean` from 1 below which the policy hardly moves: a twentieth of the clip range, 0.2."""
UNCHANGED_KL = 1e-3
"""KL in nats per token (`actor/ref_kl`, else `actor/ppo_kl`) below which the policy hardly moves. Runs that learn have ten times that."""
UNCHANGED_ENTROPY = 0.05
"""Relative change of the mean entropy from the first to the second half of the window. Below it, the entropy counts as constant.

In runs that learn, it falls by half in 20 updates.
"""
COLLAPSED_ENTROPY = 0.05
"""Ratio of the entropy to that of the first updates. Below it, the entropy has collapsed, unless the reward still rises."""
LOW_SIGNAL_FRACTION = 0.1
"""Share of groups with signal below which a hint is given: more than nine tenths of the groups have no gradient."""
MIN_SIGNAL_FRACTION = 0.02
"""Minimum share of groups with signal for the hint to raise the learning rate. A small share suffices for dynamic sampling."""
HIGH_TRUNCATED_FRACTION = 0.2
"""Share of truncated responses above which a hint is given. They rarely contain an answer, so their rewards are decided by the limit."""
MIN_IDLE_UPDATES = 5
"""The idle hint requires more updates than this. Times exclude the first, because it also waits for generation to start."""
HIGH_IDLE = 0.5
"""Idle share of the trainer's time from which generation is the bottleneck."""


class HintWatch:
    """Observes all updates of a run, and returns hints."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._updates: deque[UpdateStats] = deque(maxlen=WINDOW)
        self._first_entropies: list[float] = []
        self._num_updates = 0
        self._reported_at: dict[str, int] = {}
        self._hints: tuple[tuple[str, Callable[[], str]], ...] = (
            ("equal", self._equal_rewards_hint),
            ("truncated", self._truncation_hint),
            ("collapsed", self._collapsed_entropy_hint),
            ("unchanged", self._unchanged_policy_hint),
        )

    def update(self, group_means: Sequence[float], metrics: Mapping[str, float]) -> list[str]:
        """The hints that an update triggers. `group_means`: rewards of all groups, dropped ones included."""
        if (update := UpdateStats.from_group_means(group_means, metrics)) is None:
            return []
        self._num_updates += 1
        self._updates.append(update)
        if len(self._first_entropies) < RECENT_UPDATES and "actor/entropy" in metrics:
            self._first_entropies.append(metrics["actor/entropy"])
        lines = []
        for name, find_hint in self._hints:
            quiet_until = self._reported_at.get(name, -REPEAT_UPDATES) + REPEAT_UPDATES
            if self._num_updates >= quiet_until and (line := find_hint()):
                self._reported_at[name] = self._num_updates
                lines.append(line)
        return lines

    def _recent_mean(self, name: str, updates: int = RECENT_UPDATES) -> float | None:
        """Mean of a metric over the latest updates; None if an update lacks the metric, or if there are too few updates."""
        values = [step.metrics.get(name) for step in list(self._updates)[-updates:]]
        present_values = [value for value in values if value is not None]
        return statistics.fmean(present_values) if len(present_values) == updates else None

    def _reward_rises(self) -> bool:
        """Whether the reward of the window's second half is above that of the first by more than sampling explains."""
        half = len(self._updates) // 2
        early_updates, late_updates = list(self._updates)[:half], list(self._updates)[-half:]
        early_mean, late_mean = (statistics.fmean(update.reward for update in updates) for updates in (early_updates, late_updates))
        standard_error = (sum(update.variance for update in early_updates) + sum(update.variance for update in late_updates)) ** 0.5 / half
        return late_mean - early_mean > RISE_STANDARD_ERRORS * standard_error

    def _equal_rewards_hint(self) -> str:
        share = self._recent_mean("reward/signal_fraction", 2 * RECENT_UPDATES)
        if share is None or share >= LOW_SIGNAL_FRACTION:
            return ""
        reward = statistics.fmean(step.reward for step in self._updates)
        group = self._recipe.train.rl.group_size
        return (
            f"all responses have equal rewards in {1 - share:.0%} of the groups, which therefore have no gradient; the mean reward is "
            f"{reward:.2g}: if it is low, use easier rows or give partial credit; if it is high, use harder rows; or raise "
            f"train.rl.group_size: {group}"
        )

    def _truncation_hint(self) -> str:
        share = self._recent_mean("response/truncated_fraction")
        if share is None or share <= HIGH_TRUNCATED_FRACTION:
            return ""
        limit = self._recipe.rollout.max_tokens
        return (
            f"{share:.0%} of the responses are truncated at rollout.max_tokens: {limit} before they state an answer; raise it and "
            "rollout.context, or ask for shorter responses in the prompt"
        )

    def _collapsed_entropy_hint(self) -> str:
        entropy = self._recent_mean("actor/entropy")
        if entropy is None or len(self._updates) < WINDOW or len(self._first_entropies) < RECENT_UPDATES:
            return ""
        initial = statistics.fmean(self._first_entropies)
        if entropy >= COLLAPSED_ENTROPY * initial or self._reward_rises():
            return ""
        clip = self._recipe.train.rl.clip_high
        return (
            f"the entropy has collapsed from {initial:.2g} to {entropy:.2g} nats, and the reward no longer rises: the policy explores too "
            f"little; raise train.rl.clip_high: {clip:g} or train.rl.entropy_coef, lower train.rl.optimizer.lr, or use harder rows"
        )

    def _unchanged_policy_hint(self) -> str:
        signal = self._recent_mean("reward/signal_fraction", WINDOW)
        if signal is None or signal < MIN_SIGNAL_FRACTION or self._reward_rises():
            return ""
        ratio, ppo_kl = self._recent_mean("actor/ratio_mean", WINDOW), self._recent_mean("actor/ppo_kl", WINDOW)
        ref_kl = self._recent_mean("actor/ref_kl")
        kl = ref_kl if ref_kl is not None else ppo_kl
        if ratio is None or kl is None or abs(ratio - 1) > UNCHANGED_RATIO or abs(kl) > UNCHANGED_KL or self._entropy_changes():
            return ""
        kl_name = "KL to the start" if ref_kl is not None else "KL of an update"
        lr = self._recipe.train.rl.optimizer.lr
        return (
            f"nothing moves: over {WINDOW} updates the reward is flat, actor/ratio_mean is {ratio:.3f}, and the {kl_name} is "
            f"{kl:.1e} nats; raise train.rl.optimizer.lr: {lr:g} by a factor of 3, or raise train.rl.minibatches"
        )

    def _entropy_changes(self) -> bool:
        values = [step.metrics["actor/entropy"] for step in self._updates if "actor/entropy" in step.metrics]
        half = len(values) // 2
        if not half:
            return False
        early_mean, late_mean = statistics.fmean(values[:half]), statistics.fmean(values[-half:])
        return abs(late_mean - early_mean) > UNCHANGED_ENTROPY * abs(early_mean)


class IdleWatch:
    """Accumulates the idle times of the trainer and of the engines."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._updates = 0
        self._seconds = self._trainer_idle_s = self._rollout_idle_s = 0.0

    def observe(self, times: Mapping[str, float]) -> None:
        """Add the times of an update. `times`: the result of `BusyClock.read_and_reset`."""
        self._updates += 1
        if self._updates > 1:
            seconds = times["timing_s/step"]
            self._seconds += seconds
            self._trainer_idle_s += seconds * times["async/trainer_idle"]
            self._rollout_idle_s += seconds * times["async/rollout_idle"]

    def hint(self) -> str | None:
        """A line for the end of the stage; None if generation was not the bottleneck, or if there were too few updates."""
        if self._updates <= MIN_IDLE_UPDATES or self._seconds <= 0:
            return None
        trainer_idle, rollout_idle = self._trainer_idle_s / self._seconds, self._rollout_idle_s / self._seconds
        if trainer_idle < HIGH_IDLE or rollout_idle > trainer_idle / 2:
            return None
        return f"the trainer waited for samples {trainer_idle:.0%} of the time (async/trainer_idle); {self._suggest_fix()}"

    def _suggest_fix(self) -> str:
        rollout, train = self._recipe.rollout, self._recipe.train
        if self._recipe.device == "cpu":
            return "raise rollout.replicas if the machine has idle cores, or rollout.max_in_flight"
        fixes = ["raise rollout.replicas (for a small model with several engines per GPU, for example rollout.gpus: 0.3)"]
        if rollout.tp == 1 and not rollout.elastic and not rollout.on_trainer_gpus and train.gpus == 1:
            fixes.append("run an engine on the trainer's GPU as well (rollout.on_trainer_gpus: 1, train.gpus: 0.5, sync.transport: ipc)")
        return ", or ".join(fixes)
