"""Chooses the number of draft tokens per step by measuring the current load.

A step with k draft tokens takes a time `t(k)`, which depends on the batch size, and yields `1 + a(1) + … + a(k)` tokens per request, where
`a(i)` is the acceptance of the draft at position i. The choice is the k with the highest throughput, `(1 + a(1) + … + a(k)) / t(k)`.

The acceptance is measured in every step that verifies drafts. Times are measured in trials: a trial runs some steps with each k. Between
trials, a change of the current step time scales the times of all k, because longer contexts and a busy host slow all of them.

Steps with a slow k cost throughput. `LOSS_SHARE` limits this cost to a share of all steps: after a trial that cost the work of n steps, the
next one is due n / `LOSS_SHARE` steps later. The cost of the first trial is exempt. Until a trial is permitted, a load without times uses
the times of the nearest measured load. Before the first trial, a draft is assumed to add `PRIOR_DRAFT_COST` of a step, so an engine whose
drafts are never accepted stops drafting.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

SETTLE_STEPS = 6
"""Untimed steps after a change: steps in flight still have the old number of drafts, and CUDA graphs warm up."""
WINDOW_STEPS = 16
"""Timed steps for each number of drafts."""
PRIOR_DRAFT_COST = 0.05
"""Assumed cost of a draft before it is measured, as a share of a step."""
MIN_REQUEST_STEPS = 256
"""Request-steps (the sum of requests over steps) with verified drafts before which the acceptance counts as unknown."""
LOSS_SHARE = 0.005
"""Maximum cost of trials, as a share of all steps."""
MIN_GAIN = 0.01
"""Minimum gain in throughput at which the choice changes, as a share of the current throughput."""
MAX_LOAD_RATIO = 1.5
"""Maximum factor by which the number of requests may change during a trial, in either direction."""
ACCEPTANCE_WINDOW = 4096
"""Request-steps over which acceptance is averaged."""
WEIGHT_AFTER_UPDATE = 256
"""Maximum weight, in request-steps, of the acceptance that was measured before a weight update."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step: `requests` requests with `drafts` drafts each took `seconds`; `accepted[i]` of them accepted the draft at position i."""

    requests: int
    drafts: int
    seconds: float
    accepted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision for about `requests` requests; `tokens_per_s`: measured throughput by number of drafts."""

    requests: int
    drafts: int
    tokens_per_s: dict[int, float]

    def __str__(self) -> str:
        rates = ", ".join(f"{rate:,.0f} tokens/s with {drafts}" for drafts, rate in sorted(self.tokens_per_s.items()))
        return f"speculation: {self.drafts} draft tokens for about {self.requests} concurrent requests ({rates})"


@dataclass(slots=True)
class _Load:
    """Measurements for a range of batch sizes, given by `_load_index`."""

    times: dict[int, float] = field(default_factory=dict)
    """Seconds per step by number of drafts."""
    chosen: int | None = None
    """The choice at this load; None until a trial at this load is complete."""


class SpeculationSwitch:
    """Call `next_drafts()` before each step and `observe(step)` after it. `report` receives every changed decision."""

    def __init__(self, max_drafts: int, report: Callable[[Choice], None] = lambda choice: None) -> None:
        self.max_drafts = max_drafts
        self.trials = 0
        self.switches = 0
        self._report = report
        self._reset()

    def _reset(self) -> None:
        self._fixed_drafts: int | None = None
        self._current_drafts = self.max_drafts
        self._loads: dict[int, _Load] = {}
        self._untried_drafts: deque[int] = deque()
        self._timed_steps: list[Step] = []
        self._settling_steps = SETTLE_STEPS
        self._verified_counts = [0.0] * self.max_drafts
        self._accepted_counts = [0.0] * self.max_drafts
        self._steps = 0
        self._lost_steps = 0.0
        self._first_trial_loss: float | None = None
        self._next_trial_step: float | None = None
        self._trial_requests = 0
        self._trial_steps = 0
        self._steps_at_load = 0
        self._last_load_index = -1

    # ------------------------------------------------------------------------------------------------- before a step

    def fix_drafts(self, drafts: int | None) -> None:
        """Always use `drafts`; None: choose automatically again. Deletes all measurements."""
        if drafts is not None and not 0 <= drafts <= self.max_drafts:
            raise ValueError(f"from 0 to {self.max_drafts} draft tokens are possible, got {drafts}")
        self._reset()
        self._fixed_drafts = drafts

    def on_weight_update(self) -> None:
        """Reduce the weight of the acceptance measured so far to `WEIGHT_AFTER_UPDATE`. A trial is due as soon as `LOSS_SHARE` permits.

        Step times do not depend on the weights, and are kept.
        """
        for position, count in enumerate(self._verified_counts):
            weight = min(1.0, WEIGHT_AFTER_UPDATE / count) if count else 1.0
            self._verified_counts[position] *= weight
            self._accepted_counts[position] *= weight
        self._next_trial_step = self._steps

    def next_drafts(self) -> int:
        """Number of draft tokens per request in the next step."""
        return self._current_drafts if self._fixed_drafts is None else self._fixed_drafts

    @property
    def in_trial(self) -> bool:
        """Whether a trial is in progress."""
        return bool(self._untried_drafts)

    # -------------------------------------------------------------------------------------------------- after a step

    def observe(self, step: Step) -> None:
        """Record a step in which all requests decoded."""
        self._record_acceptance(step)
        if self._fixed_drafts is not None:
            return
        self._steps += 1
        load_index = _load_index(step.requests)
        self._steps_at_load = self._steps_at_load + 1 if load_index == self._last_load_index else 0
        self._last_load_index = load_index
        if self._untried_drafts:
            self._time_step(step, load_index)
            return
        load = self._loads.setdefault(load_index, _Load())
        self._scale_times(step, load)
        is_due = self._next_trial_step is None or self._steps >= self._next_trial_step
        is_allowed = self._first_trial_loss is None or self._lost_steps - self._first_trial_loss <= LOSS_SHARE * self._steps
        if is_allowed and self._steps_at_load >= WINDOW_STEPS and (is_due or load.chosen is None):
            self._start_trial(step.requests, load)
            return
        drafts = (
            self._find_fastest(load.times, self._current_drafts)
            if len(load.times) == self.max_drafts + 1
            else self._choice_for_unmeasured_load(load_index)
        )
        self._choose(drafts, step.requests, load)

    def _record_acceptance(self, step: Step) -> None:
        for position in range(min(step.drafts, len(step.accepted), self.max_drafts)):
            weight = max(0.0, 1 - step.requests / ACCEPTANCE_WINDOW)
            self._verified_counts[position] = weight * self._verified_counts[position] + step.requests
            self._accepted_counts[position] = weight * self._accepted_counts[position] + step.accepted[position]

    def _scale_times(self, step: Step, load: _Load) -> None:
        """Scale the times of all numbers of drafts towards the current step time."""
        if self._settling_steps:
            self._settling_steps -= 1
        elif step.drafts == self._current_drafts and step.drafts in load.times and _is_typical(step, load):
            factor = 1 + (step.seconds / load.times[step.drafts] - 1) / (4 * WINDOW_STEPS)
            load.times = {drafts: factor * seconds for drafts, seconds in load.times.items()}

    def _start_trial(self, requests: int, load: _Load) -> None:
        """Start a trial of all numbers of drafts. The largest is first, because it measures the acceptance of all positions.

        If the first trial at this load was aborted, only the numbers without times are tried.
        """
        self._trial_requests, self._trial_steps = requests, 0
        self._untried_drafts = deque(
            drafts for drafts in range(self.max_drafts, -1, -1) if load.chosen is not None or drafts not in load.times
        )
        self._set_current_drafts(self._untried_drafts[0])

    def _time_step(self, step: Step, load_index: int) -> None:
        self._trial_steps += 1
        if not 1 / MAX_LOAD_RATIO <= step.requests / self._trial_requests <= MAX_LOAD_RATIO:
            self._abort_trial(load_index)
            return
        if self._settling_steps:
            self._settling_steps -= 1
            return
        if step.drafts != self._untried_drafts[0]:
            return
        self._timed_steps.append(step)
        if len(self._timed_steps) < WINDOW_STEPS:
            return
        trial_load = self._loads.setdefault(_load_index(self._trial_requests), _Load())
        trial_load.times[step.drafts] = statistics.median(timed_step.seconds for timed_step in self._timed_steps)
        self._timed_steps.clear()
        self._untried_drafts.popleft()
        if self._untried_drafts:
            self._set_current_drafts(self._untried_drafts[0])
            return
        self._finish_trial(step.requests, trial_load)

    def _abort_trial(self, load_index: int) -> None:
        """Abort a trial because the load changed. Its steps count as lost, except in the first trial."""
        self._untried_drafts.clear()
        self._timed_steps.clear()
        if self._first_trial_loss is not None:
            self._lost_steps += self._trial_steps
        self._set_current_drafts(self._choice_for_unmeasured_load(load_index))

    def _finish_trial(self, requests: int, load: _Load) -> None:
        rates = self._compute_rates(load.times)
        best_drafts = self._find_fastest(load.times, load.chosen)
        lost_steps = sum((SETTLE_STEPS + WINDOW_STEPS) * max(0.0, 1 - rate / rates[best_drafts]) for rate in rates.values())
        self._lost_steps += lost_steps
        if self._first_trial_loss is None:
            self._first_trial_loss = lost_steps
        self._next_trial_step = self._steps + max(lost_steps / LOSS_SHARE, 16.0 * WINDOW_STEPS)
        self.trials += 1
        previous_drafts, load.chosen = load.chosen, best_drafts
        self._set_current_drafts(best_drafts)
        if previous_drafts != best_drafts:
            self._record_switch(requests, best_drafts, load)

    def _choose(self, drafts: int, requests: int, load: _Load) -> None:
        if load.chosen is not None and drafts != load.chosen:
            self._record_switch(requests, drafts, load)
            load.chosen = drafts
        if drafts != self._current_drafts:
            self._set_current_drafts(drafts)

    def _set_current_drafts(self, drafts: int) -> None:
        self._current_drafts = drafts
        self._settling_steps = SETTLE_STEPS

    def _record_switch(self, requests: int, drafts: int, load: _Load) -> None:
        self.switches += 1
        self._report(Choice(requests, drafts, {k: requests * rate for k, rate in self._compute_rates(load.times).items()}))

    # ------------------------------------------------------------------------------------------------------ arithmetic

    def expected_tokens(self, drafts: int) -> float:
        """Tokens per request in a step with `drafts` drafts."""
        accepted = (self._accepted_counts[i] / self._verified_counts[i] if self._verified_counts[i] else 0.0 for i in range(drafts))
        return 1.0 + sum(accepted)

    def _compute_rates(self, times: dict[int, float]) -> dict[int, float]:
        """Tokens per second and request, by number of drafts."""
        return {drafts: self.expected_tokens(drafts) / seconds for drafts, seconds in times.items()}

    def _find_fastest(self, times: dict[int, float], current: int | None) -> int:
        rates = self._compute_rates(times)
        best_drafts = max(rates, key=lambda drafts: rates[drafts])
        if current is not None and current in rates and rates[current] * (1 + MIN_GAIN) >= rates[best_drafts]:
            return current
        return best_drafts

    def _choice_for_unmeasured_load(self, load_index: int) -> int:
        """The fastest number of drafts by the times of the nearest measured load, or by `PRIOR_DRAFT_COST` if none is measured."""
        measured_times = {index: load.times for index, load in self._loads.items() if load.chosen is not None}
        if measured_times:
            return self._find_fastest(measured_times[min(measured_times, key=lambda index: abs(index - load_index))], self._current_drafts)
        if self._verified_counts[0] < MIN_REQUEST_STEPS:
            return self.max_drafts
        return self._find_fastest({drafts: 1 + PRIOR_DRAFT_COST * drafts for drafts in range(self.max_drafts + 1)}, self._current_drafts)


def _load_index(requests: int) -> int:
    """Index of the load by powers of two: 1, 2, 3–4, 5–8, … requests."""
    return max(requests - 1, 0).bit_length()


def _is_typical(step: Step, load: _Load) -> bool:
    """Whether the step took less than twice its known time; slower steps have another cause."""
    return step.seconds < 2 * load.times[step.drafts]
