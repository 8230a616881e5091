"""vLLM's scheduler, with the number of draft tokens chosen by a `SpeculationSwitch` (`scheduler_cls`; vLLM 0.32.0).

vLLM can draft fewer tokens for larger batches, by a table that is fixed at the start (`num_speculative_tokens_per_batch_size`). Here all
entries of the table are equal, and the table is replaced before each step. `patches.drafter` skips the drafter in steps without drafts.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter, defaultdict, deque
from functools import partial
from typing import TYPE_CHECKING

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput

from mtpctl.rollout.protocol import SpeculationState
from mtpctl.rollout.switch import Choice, SpeculationSwitch, Step

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.structured_output import StructuredOutputManager

TIMED = 512
"""Number of recent steps whose times are stored, for each number of drafts."""

log = logging.getLogger("vllm.mtpctl")  # a child of vLLM's logger, which is configured in every process of an engine


class SwitchingScheduler(Scheduler):
    """Gets the number of drafts from the switch before each step, and reports the step's time and accepted drafts to it."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        structured_output_manager: StructuredOutputManager,
        block_size: int,
        hash_block_size: int | None = None,
        *,
        include_finished_set: bool = False,
        log_stats: bool = False,
    ) -> None:
        super().__init__(
            vllm_config,
            kv_cache_config,
            structured_output_manager,
            block_size,
            hash_block_size,
            include_finished_set=include_finished_set,
            log_stats=log_stats,
        )
        assert self.dynamic_sd_lookup is not None, "the settings contain a schedule of draft tokens"
        self.switch = SpeculationSwitch(self.num_spec_tokens, self._log_choice)
        size = len(self.dynamic_sd_lookup)
        self._tables = [[drafts] * size for drafts in range(self.num_spec_tokens + 1)]
        self._last: tuple[float, int] | None = None
        self._choice = ""
        self._steps: Counter[int] = Counter()
        self._step_s: dict[int, deque[float]] = defaultdict(partial(deque, maxlen=TIMED))

    def _log_choice(self, choice: Choice) -> None:
        self._choice = str(choice)
        log.warning("%s", choice)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule a step with the switch's number of drafts."""
        drafts = self.switch.drafts()
        self._steps[drafts] += 1
        self.dynamic_sd_lookup = self._tables[drafts]
        return super().schedule(throttle_prefills)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        """Report the step to the switch, and process its output."""
        self._observe(scheduler_output, model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _observe(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Report a step to the switch if this step and the one before it only decoded, with the same number of drafts."""
        now = time.perf_counter()
        requests = len(scheduled.num_scheduled_tokens)
        drafts = scheduled.num_spec_tokens_to_schedule
        # Runs between steps, for hundreds of requests: sets and counters are faster than a loop.
        drafting = sum(map(bool, scheduled.scheduled_spec_decode_tokens.values()))
        whole = set(scheduled.num_scheduled_tokens.values()) == {1 + drafts} and drafting == (requests if drafts else 0)
        last, self._last = self._last, (now, drafts) if whole else None
        if not whole or last is None or last[1] != drafts:
            return
        lengths = Counter(map(len, output.sampled_token_ids))
        accepted = tuple(sum(count for length, count in lengths.items() if length > position + 1) for position in range(drafts))
        self._step_s[drafts].append(now - last[0])
        self.switch.observe(Step(requests, drafts, now - last[0], accepted))

    def speculation(self, drafts: int | None, look_again: bool) -> SpeculationState:
        """Fix the number of drafts (None: unchanged; -1: automatic), and return the state. Resets `steps` and `step_s`.

        `look_again` makes the switch time all numbers of drafts again.
        """
        if drafts is not None:
            self.switch.fix(None if drafts < 0 else drafts)
        if look_again:
            self.switch.look_again()
        steps = dict(self._steps)
        step_s = {number: statistics.median(seconds) for number, seconds in self._step_s.items()}
        self._steps.clear()
        self._step_s.clear()
        return {
            "steps": steps,
            "step_s": step_s,
            "drafts": self.switch.drafts(),
            "looking": self.switch.looking,
            "looks": self.switch.looks,
            "switches": self.switch.switches,
            "message": self._choice,
        }


class AsyncSwitchingScheduler(SwitchingScheduler, AsyncScheduler):
    """The same for engines that schedule a step while the previous one runs."""
