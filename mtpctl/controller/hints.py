"""Hints during RL: common problems that the metrics show, with the recipe key to change.

Hints use means over the latest updates, so a single update triggers none. A hint is reported when its condition first holds, and again if
it still holds `REPEAT` updates later. A long wait for samples is reported at the end of the stage.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mtpctl.controller.stability import observe
from mtpctl.recipe.schema import Recipe

WINDOW = 20
"""Updates over which a trend is measured, as the difference of its halves. The run in docs/your-first-run.md gains at least 5 points."""
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
MIN_UPDATES = 5
"""The hint about waits needs more updates. The first is not in the times, because it also waits for generation to start."""
HIGH_IDLE = 0.5
"""Idle share of the trainer's time from which generation is the bottleneck."""


@dataclass(frozen=True, slots=True)
class Step:
    """The metrics of one update. `reward`: mean over all its groups. `error2`: squared standard error of that mean."""

    reward: float
    error2: float
    metrics: Mapping[str, float]


class HintWatch:
    """Observes all updates of a run, and returns hints."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._steps: deque[Step] = deque(maxlen=WINDOW)
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
        observed = observe(group_means, None)
        if observed is None:
            return []
        self._count += 1
        self._steps.append(Step(observed.mean, observed.error2, dict(metrics)))
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
        values = [step.metrics.get(name) for step in list(self._steps)[-updates:]]
        present = [value for value in values if value is not None]
        return statistics.fmean(present) if len(present) == updates else None

    def _rises(self) -> bool:
        """Whether the reward of the window's second half is above that of the first by more than sampling explains."""
        half = len(self._steps) // 2
        early, late = list(self._steps)[:half], list(self._steps)[-half:]
        difference = statistics.fmean(s.reward for s in late) - statistics.fmean(s.reward for s in early)
        error = (sum(s.error2 for s in early) + sum(s.error2 for s in late)) ** 0.5 / half
        return difference > FLAT_ERRORS * error

    def _equal_groups(self) -> str:
        share = self._recent("reward/signal_fraction", 2 * RECENT)
        if share is None or share >= FEW_SIGNALS:
            return ""
        reward = statistics.fmean(step.reward for step in self._steps)
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
        if entropy is None or len(self._steps) < WINDOW or len(self._first_entropies) < RECENT:
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
        values = [step.metrics["actor/entropy"] for step in self._steps if "actor/entropy" in step.metrics]
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
        if self._updates <= MIN_UPDATES or self._seconds <= 0:
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
