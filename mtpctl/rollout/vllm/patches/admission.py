"""Hold back waiting requests and admit several in one step, if that is faster (vLLM 0.32.0).

vLLM starts a waiting request as soon as a slot is free. With short responses, nearly every step then contains a prefill, and few steps
replay the full CUDA graph of a step that only decodes. To hold requests back for a step, the patch sets the scheduler's pause state in
which vLLM runs only requests that have started.

A step with a prefill costs more than one that only decodes: it replays no full CUDA graph, and prepares more on the host. For small models
this is a large part of a step. While requests are held back, their slots are empty. So requests are held back until the cost of the empty
slots equals the extra cost of a step with a prefill, which is the optimal order size of inventory theory (Harris 1913).

The costs are measured. A cycle begins at a step with a prefill and ends before the next one. Its duration is fitted by least squares:

    seconds = step · steps + prefill + token · prefilled tokens

`prefill` is the cost that holding back saves. If it is not significantly above 0, requests are admitted immediately. This is so for large
models, whose prefills take as long in one step as in several.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from typing import TYPE_CHECKING, cast

import numpy as np

from mtpctl.rollout.vllm.patches import IMMEDIATE_ADMISSION, assign, patch

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore


MIN_SLOTS = 32
"""Engines with fewer slots admit requests immediately."""
MIN_LOAD = 0.9
"""Minimum number of running and waiting requests, as a share of the slots. With fewer, requests are admitted immediately."""
MAX_HELD_SHARE = 1 / 4
"""Maximum requests held back, as a share of the slots."""
MAX_HOLD_S = 0.25
"""Maximum seconds for which requests are held back."""
WINDOW = 96
"""Recent cycles to fit."""
MIN_CYCLES = 24
"""Minimum number of cycles for a fit. With fewer, one trial follows another."""
FIT_EVERY = 16
"""Cycles between two fits."""
TRIAL_EVERY, TRIAL_HOLD_STEPS = 256, (0, 3, 1, 2, 4, 0, 2, 3)
"""Cycles between two trials, and the number of steps for which each cycle of a trial holds requests back.

The numbers differ, because cycles of equal length do not determine `step` and `prefill` separately.
"""
STANDARD_ERRORS = 2.0
"""Standard errors that are subtracted from the estimated cost of a prefill."""
OUTLIER_FACTOR = 4.0
"""Cycles whose time per step exceeds this multiple of the median are dropped, because they contain a pause, such as a weight update."""


class AdmissionBursts:
    """Decides before each step whether to hold requests back. Call `should_hold` before a step, and `record_step` after it is scheduled."""

    def __init__(self, slots: int) -> None:
        self.step_s, self.prefill_s = 0.0, 0.0
        self._slots = slots
        self._cycles: deque[tuple[float, float, float]] = deque(maxlen=WINDOW)  # seconds, steps, prefilled tokens
        self._cycles_since_fit = self._cycles_since_trial = 0
        self._trials: deque[int] = deque()
        self._cycle_started_at: float | None = None
        self._cycle_steps = self._cycle_tokens = 0
        self._held_steps, self._hold_started_at, self._held_cost_s = 0, 0.0, 0.0

    def should_hold(self, now: float, running: int, waiting: int) -> bool:
        """Whether to hold requests back in the next step. `now`: monotonic seconds. `running`, `waiting`: numbers of requests."""
        num_admissible = min(waiting, self._slots - running)
        if (
            self._slots < MIN_SLOTS
            or num_admissible <= 0
            or running + waiting < MIN_LOAD * self._slots
            or num_admissible >= MAX_HELD_SHARE * self._slots
        ):
            return self._end_hold()
        if not self._held_steps:
            self._hold_started_at = now
        elif now - self._hold_started_at >= MAX_HOLD_S:
            return self._end_hold()
        self._held_cost_s += self.step_s * num_admissible / running
        is_due = self._held_steps >= self._trials[0] if self._trials else self._held_cost_s >= self.prefill_s
        if is_due:
            return self._end_hold()
        self._held_steps += 1
        return True

    def _end_hold(self) -> bool:
        """Reset the hold. Returns False, the result of `should_hold`."""
        self._held_steps, self._held_cost_s = 0, 0.0
        return False

    def record_step(self, now: float, running: int, prefilled: int) -> None:
        """Record a step. `now`: time before it was scheduled. `running`: requests in it. `prefilled`: prefill tokens in it."""
        if running < MIN_LOAD * (1 - MAX_HELD_SHARE) * self._slots:
            self._cycle_started_at = None
            return
        if prefilled:
            if self._cycle_started_at is not None:
                self._end_cycle(now - self._cycle_started_at)
            self._cycle_started_at, self._cycle_steps, self._cycle_tokens = now, 0, prefilled
        self._cycle_steps += 1

    def _end_cycle(self, seconds: float) -> None:
        self._cycles.append((seconds, float(self._cycle_steps), float(self._cycle_tokens)))
        if self._trials:
            self._trials.popleft()
        self._cycles_since_fit += 1
        self._cycles_since_trial += 1
        if len(self._cycles) >= MIN_CYCLES and self._cycles_since_fit >= FIT_EVERY:
            self._cycles_since_fit = 0
            self.step_s, self.prefill_s = fit_costs(list(self._cycles))
        if not self._trials and (len(self._cycles) < MIN_CYCLES or self._cycles_since_trial >= TRIAL_EVERY):
            self._cycles_since_trial = 0
            self._trials.extend(TRIAL_HOLD_STEPS)


def fit_costs(cycles: list[tuple[float, float, float]]) -> tuple[float, float]:
    """Fit cycles (seconds, steps, prefilled tokens). Returns the coefficients `step` and `prefill`, in seconds.

    `STANDARD_ERRORS` standard errors are subtracted from `prefill`. Both are 0 if the cycles do not determine them.
    """
    median_step_s = statistics.median(seconds / steps for seconds, steps, _ in cycles)
    usual_cycles = np.array([cycle for cycle in cycles if cycle[0] <= OUTLIER_FACTOR * median_step_s * cycle[1]])
    features = np.column_stack([usual_cycles[:, 1], np.ones(len(usual_cycles)), usual_cycles[:, 2]])
    scale = np.maximum(features.max(axis=0), 1.0)
    solution, _, rank, _ = np.linalg.lstsq(features / scale, usual_cycles[:, 0], rcond=1e-6)
    if rank < features.shape[1] or len(usual_cycles) <= rank:
        return 0.0, 0.0
    residual = usual_cycles[:, 0] - features / scale @ solution
    variance = float(residual @ residual) / (len(usual_cycles) - rank)
    errors = np.sqrt(variance * np.diag(np.linalg.inv((features / scale).T @ (features / scale))))
    step_s, prefill_s = float(solution[0] / scale[0]), float(solution[1] - STANDARD_ERRORS * errors[1])
    return (step_s, max(0.0, prefill_s)) if step_s > 0 else (0.0, 0.0)


_STATE = "mtpctl_bursts"


@patch
def install_admission() -> None:
    """Hold requests back before a step if `AdmissionBursts.should_hold` returns true."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    upstream = Scheduler.schedule

    def schedule(self: Scheduler, throttle_prefills: bool = False) -> SchedulerOutput:
        running, waiting = self.get_request_counts()
        bursts, now = _bursts(self), time.perf_counter()
        if bursts is None or self._pause_state != PauseState.UNPAUSED:
            return upstream(self, throttle_prefills)
        holds_back = bursts.should_hold(now, running, waiting)
        if holds_back:
            self._pause_state = PauseState.PAUSED_NEW
        try:
            output = upstream(self, throttle_prefills)
        finally:
            if holds_back:
                self._pause_state = PauseState.UNPAUSED
        bursts.record_step(now, len(output.num_scheduled_tokens), count_prefilled_tokens(self, output))
        return output

    assign(Scheduler, schedule=schedule)
    assign(EngineCore, mtpctl_set_immediate_admission=_set_immediate_admission)


def _bursts(scheduler: Scheduler) -> AdmissionBursts | None:
    """The scheduler's `AdmissionBursts`; None if it admits requests immediately."""
    if _STATE not in scheduler.__dict__:
        _reset_bursts(scheduler, immediate=bool(os.environ.get(IMMEDIATE_ADMISSION)))
    bursts: AdmissionBursts | None = scheduler.__dict__[_STATE]
    return bursts


def _reset_bursts(scheduler: Scheduler, *, immediate: bool) -> None:
    scheduler.__dict__[_STATE] = None if immediate else AdmissionBursts(scheduler.max_num_running_reqs)


def _set_immediate_admission(self: EngineCore, immediate: bool) -> None:
    """Switch holding back on or off. Measurements restart."""
    _reset_bursts(cast("Scheduler", self.scheduler), immediate=immediate)


def count_prefilled_tokens(scheduler: Scheduler, output: SchedulerOutput) -> int:
    """Prefill tokens of a step: the tokens of each request in excess of what it decodes at most, one token and all drafts."""
    decode_tokens = 1 + scheduler.num_spec_tokens
    counts = output.num_scheduled_tokens.values()
    if not counts or max(counts) <= decode_tokens:
        return 0
    return sum(count - decode_tokens for count in counts if count > decode_tokens)
