"""Hints during RL: what an experienced reader of the metrics would say, with the recipe key to change.

Each hint looks at the mean of a metric over the latest updates, so that a single update triggers none. It is reported when its condition
first holds, and again if it still holds `REPEAT` updates later.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mtpctl.controller.stability import observe
from mtpctl.recipe.schema import Recipe

WINDOW = 20
"""Updates of a trend, which is the difference of its halves. A run of docs/your-first-run.md that learns gains 5 points and more in it."""
RECENT = 5
"""Updates of a level, such as the share of truncated responses."""
REPEAT = 100
"""Updates after which a hint is repeated if it still holds."""
FLAT_ERRORS = 2.0
"""A reward has risen if its halves differ by this many standard errors."""
STILL_RATIO = 0.01
"""Distance of `actor/ratio_mean` from 1. The clip begins at 0.2, so a policy within it uses a twentieth of the room."""
STILL_KL = 1e-3
"""Nats per token, of `actor/ref_kl` or else of `actor/ppo_kl`. Runs that learn have ten times as much."""
STILL_ENTROPY = 0.05
"""Relative change of the entropy between the halves. It falls by half in 20 updates of a run that learns."""
COLLAPSED = 0.05
"""Entropy relative to the first updates. It falls to a third in runs that learn well, and further only with the reward."""
FEW_SIGNALS = 0.1
"""Share of groups with signal. Below it nine tenths of the responses are discarded."""
SOME_SIGNALS = 0.02
"""Share of groups with signal above which a larger learning rate helps. With dynamic sampling every update is full of them even then."""
TRUNCATED = 0.2
"""Share of responses at the limit of tokens. They rarely have an answer, so a fifth of the rewards is decided by the limit."""


@dataclass(frozen=True, slots=True)
class Step:
    """The metrics of one update, with the mean reward of all its groups and the squared standard error of that mean."""

    reward: float
    error2: float
    metrics: Mapping[str, float]


class HintWatch:
    """Watches all updates of a run, and returns hints."""

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
            ("still", self._still),
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
            f"the responses of a group have equal rewards in {1 - share:.0%} of the groups, which teach nothing (mean {reward:.2g}): "
            f"use easier rows if it is low, or harder ones if it is high; raise train.rl.group_size: {group}; give partial credit"
        )

    def _truncated(self) -> str:
        share = self._recent("response/truncated_fraction")
        if share is None or share <= TRUNCATED:
            return ""
        limit = self._recipe.rollout.max_tokens
        return (
            f"{share:.0%} of the responses are truncated at rollout.max_tokens: {limit} and lack their answers: raise it, and "
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

    def _still(self) -> str:
        signal = self._recent("reward/signal_fraction", WINDOW)
        if signal is None or signal < SOME_SIGNALS or self._rises():
            return ""
        ratio, kl = self._recent("actor/ratio_mean", WINDOW), self._recent("actor/ppo_kl", WINDOW)
        start = self._recent("actor/ref_kl")
        moved = start if start is not None else kl
        if ratio is None or moved is None or abs(ratio - 1) > STILL_RATIO or abs(moved) > STILL_KL or self._entropy_moves():
            return ""
        distance = f"KL to the start {moved:.1e}" if start is not None else f"KL of an update {moved:.1e}"
        lr = self._recipe.train.rl.optimizer.lr
        return (
            f"nothing moves: in {WINDOW} updates the reward is flat, the ratio {ratio:.3f} and the {distance} nats; raise "
            f"train.rl.optimizer.lr: {lr:g} by a factor of 3, or train.rl.minibatches"
        )

    def _entropy_moves(self) -> bool:
        values = [step.metrics["actor/entropy"] for step in self._steps if "actor/entropy" in step.metrics]
        half = len(values) // 2
        if not half:
            return False
        early, late = statistics.fmean(values[:half]), statistics.fmean(values[-half:])
        return abs(late - early) > STILL_ENTROPY * abs(early)
