"""Admit waiting requests several in one step if that is faster (`mtpctl.rollout.bursts`; vLLM 0.32.0).

vLLM starts a waiting request as soon as a slot is free. With short responses, then, nearly every step contains a prefill, and no step
replays the full CUDA graph of a step that only decodes. To hold requests back for a step, the scheduler is in the state in which vLLM runs
the started requests only.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, cast

from mtpctl.rollout.bursts import AdmissionBursts
from mtpctl.rollout.vllm.patches.guard import assign, patch
from mtpctl.rollout.vllm.plugin import AT_ONCE

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

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
