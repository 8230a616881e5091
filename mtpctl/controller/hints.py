"""Warnings and hints during RL: problems that the metrics show, each with the recipe keys to change.

`StabilityWatch` detects unstable learning. It compares the variance of the unfiltered reward with the variance that sampling explains.

Sampling gives the mean reward of an update's groups a variance of s² = (variance of a group's mean) / groups. A parabola is fitted to these
means over a window of updates, and its residuals are compared with s²:

    stability = min(1, mean s² / (Σ residual² / (n - 3)))      1: sampling explains the residuals; near 0: something else moves the reward

If samples are stale and not corrected, the reward overshoots and turns back. In such an oscillation, residuals half a period apart have
opposite signs, so a negative autocorrelation at some lag distinguishes it from noise.

`HintWatch` detects other common problems. Hints use means over the latest updates, so a single update triggers none. A hint is reported
when its condition first holds, and again if it still holds `REPEAT` updates later. `IdleTrainer` reports a long wait for samples at the end
of the stage.
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
    """Statistics of one update: the mean unfiltered reward of its groups, the squared standard error of that mean, and the metrics."""

    reward: float
    error2: float
    metrics: Mapping[str, float]

    @classmethod
    def of(cls, group_means: Sequence[float], metrics: Mapping[str, float]) -> Update | None:
        """From the mean rewards of all groups, including dropped ones; None for fewer than two groups."""
        if len(group_means) < 2:
            return None
        return cls(statistics.fmean(group_means), statistics.variance(group_means) / len(group_means), dict(metrics))


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
    means = [u.reward for u in updates]
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
    pairs = [(a.reward + b.reward) / 2 for a, b in itertools.pairwise(updates)]
    drops = [best - value for best, value in zip(itertools.accumulate(pairs, max), pairs, strict=True)]
    if max(drops) <= SWING_ERRORS * statistics.fmean(u.error2 for u in updates) ** 0.5:  # sampling explains the drops
        return False
    errors = residuals([u.reward for u in updates])
    return min(autocorrelation(errors, lag) for lag in range(2, len(errors) // 2 + 1)) < -SWING_CORRELATION


def fall(updates: Sequence[Update]) -> float:
    """How far the mean reward of the last `FALL_WINDOW` updates is below the best such mean; 0 if sampling may explain it."""
    if len(updates) < 2 * FALL_WINDOW:
        return 0.0
    windows = [updates[i : i + FALL_WINDOW] for i in range(len(updates) - FALL_WINDOW + 1)]
    means = [statistics.fmean(u.reward for u in window) for window in windows]
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
        if (update := Update.of(group_means, metrics)) is None:
            return {}, None
        self._updates.append(update)
        self._quiet = max(0, self._quiet - 1)
        latest = list(self._updates)[-WINDOW:]
        if len(latest) < MIN_STABILITY_UPDATES:
            return {}, None
        value = stability(latest)
        warning = None if self._quiet else self._warning(latest, value, metrics)
        if warning is not None:
            self._quiet = WINDOW
        return {"rl/stability": value}, warning

    def _warning(self, latest: list[Update], value: float, metrics: dict[str, float]) -> str | None:
        if value < SWING_STABILITY and swings(latest):
            low, high = min(u.reward for u in latest), max(u.reward for u in latest)
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
        entropies = [u.metrics["actor/entropy"] for u in self._updates if "actor/entropy" in u.metrics]
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


RECENT = 5
"""Updates over which a level is averaged, such as the share of truncated responses."""
REPEAT = 100
"""Updates after which a hint is repeated if it still holds."""
FLAT_ERRORS = 2.0
"""The reward has risen if the means of the two halves differ by more than this many standard errors."""
STILL_RATIO = 0.01
"""Distance of `actor/ratio_mean` from 1 below which the policy hardly moves: a twentieth of the clip range, 0.2."""
STILL_KL = 1e-3
"""KL in nats per token (`actor/ref_kl`, else `actor/ppo_kl`) below which the policy hardly moves. Runs that learn have ten times that."""
STILL_ENTROPY = 0.05
"""Relative change of the entropy between the halves below which it is constant. In runs that learn it falls by half in 20 updates."""
COLLAPSED = 0.05
"""Entropy relative to the first updates below which it has collapsed, unless the reward still rises."""
FEW_SIGNALS = 0.1
"""Share of groups with signal below which a hint is given: more than nine tenths of the responses are discarded."""
SOME_SIGNALS = 0.02
"""Share of groups with signal from which a larger learning rate can help. Dynamic sampling fills every update with such groups."""
TRUNCATED = 0.2
"""Share of truncated responses above which a hint is given. They rarely contain an answer, so their rewards are decided by the limit."""
MIN_IDLE_UPDATES = 5
"""The hint about waits needs more updates. The first is not in the times, because it also waits for generation to start."""
HIGH_IDLE = 0.5
"""Idle share of the trainer's time from which generation is the bottleneck."""


class HintWatch:
    """Observes all updates of a run, and returns hints."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._updates: deque[Update] = deque(maxlen=WINDOW)
        self._first_entropies: list[float] = []
        self._count = 0
        self._reported: dict[str, int] = {}
        self._hints: tuple[tuple[str, Callable[[], str]], ...] = (
            ("equal", self._equal_groups),
            ("truncated", self._truncated),
            ("collapsed", self._collapsed),
            ("still", self._unchanged_policy),
        )

    def update(self, group_means: Sequence[float], metrics: Mapping[str, float]) -> list[str]:
        """The hints that an update triggers. `group_means`: rewards of all groups, dropped ones included."""
        if (update := Update.of(group_means, metrics)) is None:
            return []
        self._count += 1
        self._updates.append(update)
        if len(self._first_entropies) < RECENT and "actor/entropy" in metrics:
            self._first_entropies.append(metrics["actor/entropy"])
        lines = []
        for name, hint in self._hints:
            quiet_until = self._reported.get(name, -REPEAT) + REPEAT
            if self._count >= quiet_until and (line := hint()):
                self._reported[name] = self._count
                lines.append(line)
        return lines

    def _recent(self, name: str, updates: int = RECENT) -> float | None:
        """Mean of a metric over the latest updates; None if one of them does not have it, or if there are fewer."""
        values = [step.metrics.get(name) for step in list(self._updates)[-updates:]]
        present = [value for value in values if value is not None]
        return statistics.fmean(present) if len(present) == updates else None

    def _rises(self) -> bool:
        """Whether the reward of the window's second half is above that of the first by more than sampling explains."""
        half = len(self._updates) // 2
        early, late = list(self._updates)[:half], list(self._updates)[-half:]
        difference = statistics.fmean(s.reward for s in late) - statistics.fmean(s.reward for s in early)
        error = (sum(s.error2 for s in early) + sum(s.error2 for s in late)) ** 0.5 / half
        return difference > FLAT_ERRORS * error

    def _equal_groups(self) -> str:
        share = self._recent("reward/signal_fraction", 2 * RECENT)
        if share is None or share >= FEW_SIGNALS:
            return ""
        reward = statistics.fmean(step.reward for step in self._updates)
        group = self._recipe.train.rl.group_size
        return (
            f"all responses have equal rewards in {1 - share:.0%} of the groups, which therefore have no gradient; the mean reward is "
            f"{reward:.2g}: if it is low, use easier rows or give partial credit; if it is high, use harder rows; or raise "
            f"train.rl.group_size: {group}"
        )

    def _truncated(self) -> str:
        share = self._recent("response/truncated_fraction")
        if share is None or share <= TRUNCATED:
            return ""
        limit = self._recipe.rollout.max_tokens
        return (
            f"{share:.0%} of the responses are truncated at rollout.max_tokens: {limit} before they state an answer; raise it and "
            "rollout.context, or ask for shorter responses in the prompt"
        )

    def _collapsed(self) -> str:
        entropy = self._recent("actor/entropy")
        if entropy is None or len(self._updates) < WINDOW or len(self._first_entropies) < RECENT:
            return ""
        first = statistics.fmean(self._first_entropies)
        if entropy >= COLLAPSED * first or self._rises():
            return ""
        clip = self._recipe.train.rl.clip_high
        return (
            f"the entropy has collapsed from {first:.2g} to {entropy:.2g} nats, and the reward no longer rises: the policy explores too "
            f"little; raise train.rl.clip_high: {clip:g} or train.rl.entropy_coef, lower train.rl.optimizer.lr, or use harder rows"
        )

    def _unchanged_policy(self) -> str:
        signal = self._recent("reward/signal_fraction", WINDOW)
        if signal is None or signal < SOME_SIGNALS or self._rises():
            return ""
        ratio, kl = self._recent("actor/ratio_mean", WINDOW), self._recent("actor/ppo_kl", WINDOW)
        start = self._recent("actor/ref_kl")
        moved = start if start is not None else kl
        if ratio is None or moved is None or abs(ratio - 1) > STILL_RATIO or abs(moved) > STILL_KL or self._entropy_moves():
            return ""
        distance = f"KL to the start is {moved:.1e}" if start is not None else f"KL of an update is {moved:.1e}"
        lr = self._recipe.train.rl.optimizer.lr
        return (
            f"nothing moves: over {WINDOW} updates the reward is flat, actor/ratio_mean is {ratio:.3f}, and the {distance} nats; raise "
            f"train.rl.optimizer.lr: {lr:g} by a factor of 3, or raise train.rl.minibatches"
        )

    def _entropy_moves(self) -> bool:
        values = [step.metrics["actor/entropy"] for step in self._updates if "actor/entropy" in step.metrics]
        half = len(values) // 2
        if not half:
            return False
        early, late = statistics.fmean(values[:half]), statistics.fmean(values[-half:])
        return abs(late - early) > STILL_ENTROPY * abs(early)


class IdleTrainer:
    """Accumulates the idle times of the trainer and of the engines."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._updates = 0
        self._seconds = self._trainer_idle_s = self._rollout_idle_s = 0.0

    def observe(self, times: Mapping[str, float]) -> None:
        """Add an update. times: the result of `BusyClock.read`."""
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
        idle, rollout_idle = self._trainer_idle_s / self._seconds, self._rollout_idle_s / self._seconds
        if idle < HIGH_IDLE or rollout_idle > idle / 2:
            return None
        return f"the trainer waited for samples {idle:.0%} of the time (async/trainer_idle); {self._fix()}"

    def _fix(self) -> str:
        rollout, train = self._recipe.rollout, self._recipe.train
        if self._recipe.device == "cpu":
            return "raise rollout.replicas if the machine has idle cores, or rollout.max_in_flight"
        ways = ["raise rollout.replicas (for a small model with several engines per GPU, for example rollout.gpus: 0.3)"]
        if rollout.tp == 1 and not rollout.elastic and not rollout.on_trainer_gpus and train.gpus == 1:
            ways.append("run an engine on the trainer's GPU as well (rollout.on_trainer_gpus: 1, train.gpus: 0.5, sync.transport: ipc)")
        return ", or ".join(ways)
