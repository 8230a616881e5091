"""Hold back waiting requests and admit several in one step, if that is faster (vLLM 0.32.0).

vLLM starts a waiting request as soon as a slot is free. With short responses, nearly every step then contains a prefill, and no step
replays the full CUDA graph of a step that only decodes. To hold requests back for a step, the scheduler is put into the state in which vLLM
runs only the started requests.

A step with a prefill costs more than one that only decodes: it replays no full CUDA graph, and prepares more on the host. For a model whose
steps are short, that is a large part of a step. While requests wait, their slots are empty. So requests are held back until the empty slots
have cost as much as one more step with a prefill does, which is the optimal order size of inventory theory (Harris 1913).

The costs are measured. A cycle begins with a step with a prefill and ends before the next one. Its seconds are fitted by least squares:

    seconds = step · steps + prefill + token · prefilled tokens

`prefill` is the cost to save. If it is not significantly above 0, requests are admitted at once, as with large models, whose prefills cost
the same in one step as in several.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from typing import TYPE_CHECKING, cast

import numpy as np

from mtpctl.rollout.vllm.patches.guard import assign, patch
from mtpctl.rollout.vllm.plugin import AT_ONCE

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore


MIN_SLOTS = 32
"""Engines with fewer slots admit at once."""
SATURATED = 0.9
"""Share of the slots that running and waiting requests must fill. An engine below it has slots for all, and latency matters more."""
MAX_SHARE = 1 / 4
"""Maximum requests held back, as a share of the slots."""
MAX_HOLD_S = 0.25
"""Maximum seconds for which requests are held back."""
WINDOW = 96
"""Cycles that are fitted."""
MIN_CYCLES = 24
FIT_EVERY = 16
"""Cycles between two fits."""
TRIAL_EVERY, TRIAL_HOLDS = 256, (0, 3, 1, 2, 4, 0, 2, 3)
"""Cycles between two trials, and the steps for which trials hold back. Cycles of equal length would not separate `step` and `prefill`."""
ERRORS = 2.0
"""Standard errors that are subtracted from the estimated cost of a prefill."""
OUTLIER = 4.0
"""Cycles whose time per step exceeds the median by this factor contain a pause, such as a weight update, and are dropped."""


class AdmissionBursts:
    """Call `hold` before each step and `scheduled` after it is scheduled."""

    def __init__(self, slots: int) -> None:
        self.step_s, self.prefill_s = 0.0, 0.0
        self._slots = slots
        self._cycles: deque[tuple[float, float, float]] = deque(maxlen=WINDOW)  # seconds, steps, prefilled tokens
        self._since_fit = self._since_trial = 0
        self._trials: deque[int] = deque()
        self._begun_at: float | None = None
        self._steps = self._tokens = 0
        self._held_steps, self._hold_began, self._cost_s = 0, 0.0, 0.0

    def hold(self, now: float, running: int, waiting: int) -> bool:
        """Whether the next step admits no request. now: monotonic seconds. running, waiting: numbers of requests."""
        ready = min(waiting, self._slots - running)
        if self._slots < MIN_SLOTS or ready <= 0 or running + waiting < SATURATED * self._slots or ready >= MAX_SHARE * self._slots:
            return self._admit()
        if not self._held_steps:
            self._hold_began = now
        elif now - self._hold_began >= MAX_HOLD_S:
            return self._admit()
        self._cost_s += self.step_s * ready / running
        if self._held_steps >= self._trials[0] if self._trials else self._cost_s >= self.prefill_s:
            return self._admit()
        self._held_steps += 1
        return True

    def _admit(self) -> bool:
        self._held_steps, self._cost_s = 0, 0.0
        return False

    def scheduled(self, now: float, running: int, prefilled: int) -> None:
        """Record a step. now: seconds before it was scheduled. running: requests in it. prefilled: prefill tokens in it."""
        if running < SATURATED * (1 - MAX_SHARE) * self._slots:
            self._begun_at = None
            return
        if prefilled:
            if self._begun_at is not None:
                self._end_cycle(now - self._begun_at)
            self._begun_at, self._steps, self._tokens = now, 0, prefilled
        self._steps += 1

    def _end_cycle(self, seconds: float) -> None:
        self._cycles.append((seconds, float(self._steps), float(self._tokens)))
        if self._trials:
            self._trials.popleft()
        self._since_fit += 1
        self._since_trial += 1
        if len(self._cycles) >= MIN_CYCLES and self._since_fit >= FIT_EVERY:
            self._since_fit = 0
            self.step_s, self.prefill_s = fit(list(self._cycles))
        if not self._trials and (len(self._cycles) < MIN_CYCLES or self._since_trial >= TRIAL_EVERY):
            self._since_trial = 0
            self._trials.extend(TRIAL_HOLDS)


def fit(cycles: list[tuple[float, float, float]]) -> tuple[float, float]:
    """Seconds of a step, and the seconds that a prefill adds to it in addition to those of its tokens; the latter less `ERRORS` errors.

    Both are 0 if the cycles do not determine them.
    """
    usual = statistics.median(seconds / steps for seconds, steps, _ in cycles)
    rows = np.array([cycle for cycle in cycles if cycle[0] <= OUTLIER * usual * cycle[1]])
    features = np.column_stack([rows[:, 1], np.ones(len(rows)), rows[:, 2]])
    scale = np.maximum(features.max(axis=0), 1.0)
    solution, _, rank, _ = np.linalg.lstsq(features / scale, rows[:, 0], rcond=1e-6)
    if rank < features.shape[1] or len(rows) <= rank:
        return 0.0, 0.0
    residual = rows[:, 0] - features / scale @ solution
    variance = float(residual @ residual) / (len(rows) - rank)
    errors = np.sqrt(variance * np.diag(np.linalg.inv((features / scale).T @ (features / scale))))
    step, prefill = float(solution[0] / scale[0]), float(solution[1] - ERRORS * errors[1])
    return (step, max(0.0, prefill)) if step > 0 else (0.0, 0.0)


_STATE = "mtpctl_bursts"


@patch
def install_admission() -> None:
    """Hold requests back before a step, if `AdmissionBursts` says so."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    upstream = Scheduler.schedule

    def schedule(self: Scheduler, throttle_prefills: bool = False) -> SchedulerOutput:
        running, waiting = self.get_request_counts()
        bursts, now = _bursts(self), time.perf_counter()
        if bursts is None or self._pause_state != PauseState.UNPAUSED:
            return upstream(self, throttle_prefills)
        held_back = bursts.hold(now, running, waiting)
        if held_back:
            self._pause_state = PauseState.PAUSED_NEW
        try:
            output = upstream(self, throttle_prefills)
        finally:
            if held_back:
                self._pause_state = PauseState.UNPAUSED
        bursts.scheduled(now, len(output.num_scheduled_tokens), prefilled_tokens(self, output))
        return output

    assign(Scheduler, schedule=schedule)
    assign(EngineCore, mtpctl_admit_at_once=_admit_at_once)


def _bursts(scheduler: Scheduler) -> AdmissionBursts | None:
    """The scheduler's `AdmissionBursts`; None if it admits at once."""
    if _STATE not in scheduler.__dict__:
        _set(scheduler, at_once=bool(os.environ.get(AT_ONCE)))
    bursts: AdmissionBursts | None = scheduler.__dict__[_STATE]
    return bursts


def _set(scheduler: Scheduler, *, at_once: bool) -> None:
    scheduler.__dict__[_STATE] = None if at_once else AdmissionBursts(scheduler.max_num_running_reqs)


def _admit_at_once(self: EngineCore, at_once: bool) -> None:
    """Switch holding back on or off. Measurements restart."""
    _set(cast("Scheduler", self.scheduler), at_once=at_once)


def prefilled_tokens(scheduler: Scheduler, output: SchedulerOutput) -> int:
    """Tokens of a step beyond those that decoding requests have: a sampled token and its drafts each."""
    decoded = 1 + scheduler.num_spec_tokens
    counts = output.num_scheduled_tokens.values()
    if not counts or max(counts) <= decoded:
        return 0
    return sum(count - decoded for count in counts if count > decoded)
