"""vLLM's engine core in the caller's process and event loop (vLLM 0.32.0).

`AsyncLLM` always starts the engine core in a separate process, and on a CPU that process starts another one for the worker: three imports
of vLLM, two messages per step, and a queue that spins on a core that the trainer could use. With one CPU worker this gains nothing. Here
the task that waits for the core's output runs the core's steps, so control calls (pause, weight updates) always fall between steps.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.model_executor.models import registry
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, PauseMode
from vllm.v1.engine.core_client import EngineCoreClient, InprocClient
from vllm.v1.request import RequestStatus

from mtpctl.rollout.vllm.patches import assign, require_pinned

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.tasks import SupportedTask
    from vllm.v1.executor import Executor


@dataclass
class _Resources:
    engine_dead: bool = False


class LoopCore(InprocClient):
    """Implements the asynchronous calls of `AsyncLLM` with vLLM's in-process client."""

    engine_ranks_managed = (0,)

    def __init__(self, vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool) -> None:
        super().__init__(vllm_config, executor_class, log_stats)
        self.resources = _Resources()
        self._ready_outputs: deque[EngineCoreOutputs] = deque()
        self._wake_event = asyncio.Event()
        self._drained_event = asyncio.Event()

    async def get_output_async(self) -> EngineCoreOutputs:
        """Run the next step and return its outputs. Other tasks run before each step.

        If a step raises, the engine is marked dead.
        """
        while True:
            await asyncio.sleep(0)
            if self._ready_outputs:
                return self._ready_outputs.popleft()
            if self.engine_core.scheduler.has_requests():
                try:
                    return self.get_output()
                except Exception:
                    self.resources.engine_dead = True
                    raise
            self._drained_event.set()
            self._wake_event.clear()
            await self._wake_event.wait()

    async def get_supported_tasks_async(self) -> tuple[SupportedTask, ...]:
        return self.get_supported_tasks()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.add_request(request)
        self._wake_event.set()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.abort_requests(request_ids)
        self._wake_event.set()

    async def pause_scheduler_async(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stop scheduling. `wait` returns when running requests have finished; the other modes return immediately."""
        core = self.engine_core
        if mode == "wait":
            core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
            self._drained_event.clear()
            self._wake_event.set()
            await self._drained_event.wait()
            core._finish_pause(clear_cache)
            return
        if mode == "abort":
            aborted_requests = core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
            outputs = [EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT) for request in aborted_requests]
            self._ready_outputs.append(EngineCoreOutputs(outputs=outputs))
            self._wake_event.set()
        core.pause_scheduler(mode=mode, clear_cache=clear_cache)

    async def resume_scheduler_async(self) -> None:
        self.engine_core.resume_scheduler()
        self._wake_event.set()

    async def is_scheduler_paused_async(self) -> bool:
        return self.engine_core.is_scheduler_paused()

    async def collective_rpc_async[R](
        self,
        method: str | Callable[..., R],
        timeout: float | None = None,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> list[R]:
        return self.engine_core.collective_rpc(method, timeout, args, kwargs)

    async def set_weight_version_async(self, weight_version: str) -> None:
        self.engine_core.set_weight_version(weight_version)

    async def get_weight_version_async(self) -> str:
        return self.engine_core.get_weight_version()

    async def reset_prefix_cache_async(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return self.engine_core.reset_prefix_cache(reset_running_requests, reset_connector)

    async def call_utility_async(self, method: str, *args: object) -> Any:
        return getattr(self.engine_core, method)(*args)

    async def add_lora_async(self, lora_request: LoRARequest) -> bool:
        return self.engine_core.add_lora(lora_request)

    async def remove_lora_async(self, lora_id: int) -> bool:
        return self.engine_core.remove_lora(lora_id)

    async def list_loras_async(self) -> set[int]:
        return self.engine_core.list_loras()


@contextmanager
def core_in_loop() -> Iterator[None]:
    """Make an `AsyncLLM` that is created in the block run its core in this process and the running event loop.

    vLLM also inspects the model class in this process instead of a new one. Raises UpstreamMoved for another release.
    """
    require_pinned(f"{__name__}.core_in_loop")
    make_mp_client, run_in_subprocess = EngineCoreClient.make_async_mp_client, registry._run_in_subprocess

    def make_loop_client(vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool, **_: object) -> LoopCore:
        return LoopCore(vllm_config, executor_class, log_stats)

    def run_in_process[R](inspect: Callable[[], R]) -> R:
        return inspect()

    assign(EngineCoreClient, make_async_mp_client=staticmethod(make_loop_client))
    assign(registry, _run_in_subprocess=run_in_process)
    try:
        yield
    finally:
        assign(EngineCoreClient, make_async_mp_client=staticmethod(make_mp_client))
        assign(registry, _run_in_subprocess=run_in_subprocess)
