"""`train.rl.train_mtp: auto`: trains the MTP layers only while that pays.

Training them costs a share of an update's time, and keeps drafts accepted. Both are measured, in shares of the time between two updates:

- the cost: seconds that an update with them takes longer, a token, than one without. Where trainer and engines have cards of their own,
  only as far as it is not time in which the trainer would wait for samples anyway;
- the loss of leaving them: tokens a decoding step, now against when they were last trained, over the time in which engines are busy; with
  cards of their own only as far as the trainer waits for samples.

So the layers train until acceptance no longer rises by what that costs, then rest, and train again when the loss has grown above the cost.
Two doubts are met by doubling a wait. A rest that had to be ended at once, or that cost more than it saved: the next one begins twice as
late. Training that did not bring acceptance back: the policy itself has become harder to draft for, and the loss has to be twice as large
before the next attempt.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field

LAG = 2
"""Updates until acceptance tells of weights: samples of an update were generated under earlier ones."""
WINDOW = 4
"""Updates that a level of acceptance is the mean of."""
HORIZON = 40
"""Updates over which what training has gained is taken to last."""
LEAST_COST = 0.004
"""Share of the time below which training is not worth stopping: a rest to measure it would cost as much."""
OLD = 0.8
"""Weight of what was measured before, in a mean over updates."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One update: its own seconds and tokens, the seconds since the one before it, those in which the trainer waited and the engines had
    nothing to do, and the tokens that a decoding step yielded (None where nothing was drafted)."""

    update_s: float
    tokens: float
    step_s: float
    trainer_idle_s: float
    rollout_idle_s: float
    accept_length: float | None


@dataclass
class PayBack:
    """The decision and what it rests on. `shared`: trainer and engines run on the same cards. Its fields can be saved as JSON."""

    shared: bool
    training: bool = True
    since: int = 0
    rest_after: int = WINDOW + LAG
    caution: float = 1.0
    seconds: dict[str, float] = field(default_factory=dict)
    lengths: list[float] = field(default_factory=list)
    reference: float = 0.0
    before: float = 0.0
    rise: float = 0.0
    saved: float = 0.0

    def state(self) -> dict[str, object]:
        """What `restored` takes."""
        return asdict(self)

    @classmethod
    def restored(cls, state: dict[str, object] | None, *, shared: bool) -> PayBack:
        """As it was saved, or from the beginning."""
        return cls(**{**(state or {}), "shared": shared})  # type: ignore[arg-type]

    def take(self, measured: Measured) -> str | None:
        """Note an update, which was done as `training` says, and decide about the next one. Returns why, where the decision changes."""
        key = "with" if self.training else "without"
        per_token = measured.update_s / max(measured.tokens, 1.0)
        # The first update after a change still pays for it: memory is allocated anew, kernels are chosen.
        if self.since:
            self.seconds[key] = OLD * self.seconds[key] + (1 - OLD) * per_token if key in self.seconds else per_token
        self.since += 1
        if measured.accept_length is None:
            why = "no draft tokens are asked for, so nothing is gained by training the drafter"
            return self._turn(False, why) if self.training else None
        self.lengths = [*self.lengths[-(4 * WINDOW) + 1 :], measured.accept_length]
        return self._while_training(measured) if self.training else self._while_resting(measured)

    def cost(self, measured: Measured) -> float | None:
        """Share of the time that training takes; None as long as it was never left out."""
        if not {"with", "without"} <= self.seconds.keys():
            return None
        extra = max(0.0, self.seconds["with"] - self.seconds["without"]) * measured.tokens
        if not self.shared:
            extra = min(extra, measured.rollout_idle_s) if self.training else max(0.0, extra - measured.trainer_idle_s)
        return extra / max(measured.step_s, 1e-9)

    def loss(self, measured: Measured, lower: float, higher: float) -> float:
        """Share of the time that `lower` tokens a decoding step cost against `higher`."""
        if lower >= higher:
            return 0.0
        seconds = (measured.step_s - measured.rollout_idle_s) * (1 - lower / higher)
        if not self.shared:
            seconds = min(seconds, measured.trainer_idle_s)
        return seconds / max(measured.step_s, 1e-9)

    def _while_training(self, measured: Measured) -> str | None:
        if self.since < self.rest_after or len(self.lengths) < WINDOW:
            return None
        level = statistics.fmean(self.lengths[-WINDOW:])
        cost = self.cost(measured)
        if cost is None:
            waits = measured.trainer_idle_s / max(measured.step_s, 1e-9)
            if not self.shared and waits > 0.2:
                return None  # it is free: the trainer waits for samples
            self.rise = self._rise(measured)
            return self._rest(level, "for a few updates, to measure what training the drafter costs")
        if cost < LEAST_COST:
            return None
        if self._rise(measured) * HORIZON > cost:
            return None
        if self.before and level < self.before + 0.25 * (self.reference - self.before):
            self.caution *= 2
        elif self.before:
            self.caution = 1.0
        return self._rest(level, f"training the drafter costs {cost:.1%} of the time, and acceptance no longer rises by it")

    def _while_resting(self, measured: Measured) -> str | None:
        if self.since < LAG + 1:
            return None
        cost = self.cost(measured)
        if cost is None or not self.reference:
            return self._turn(True, "there are draft tokens again")
        level = statistics.fmean(self.lengths[-min(WINDOW, self.since - LAG) :])
        lost = self.loss(measured, level, self.reference)
        if self.rise * HORIZON > cost:
            worth, self.rise = self.rise * HORIZON, 0.0
            return self._turn(True, f"an update with it was worth {worth:.1%} of the time, and costs {cost:.1%}")
        self.saved += cost - lost
        if cost < LEAST_COST or lost > self.caution * cost:
            if self.saved < 0 or self.since < 4 * WINDOW:
                self.rest_after *= 2
            else:
                self.rest_after = max(WINDOW + LAG, self.rest_after // 2)
            self.before = level
            why = f"acceptance fell from {self.reference:.2f} to {level:.2f} tokens a step, which costs {lost:.1%} of the time"
            return self._turn(True, f"{why}; training the drafter costs {cost:.1%}")
        return None

    def _rise(self, measured: Measured) -> float:
        """What an update's training adds, in shares of the time, while acceptance rises."""
        window = min(len(self.lengths), max(0, self.since - LAG)) // 2
        if window < WINDOW // 2:
            return 0.0
        earlier, later = self.lengths[-2 * window : -window], self.lengths[-window:]
        return self.loss(measured, statistics.fmean(earlier), statistics.fmean(later)) / window

    def _rest(self, level: float, why: str) -> str:
        self.reference = level
        return self._turn(False, why)

    def _turn(self, training: bool, why: str) -> str:
        self.training, self.since, self.saved = training, 0, 0.0
        return f"the drafter {'trains' if training else 'rests'}: {why}"
