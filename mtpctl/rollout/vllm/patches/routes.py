"""Routes of experts, which come with the end of their response (vLLM 0.32.0).

vLLM captures which experts the target's routers choose; drafters are not captured. It copies every step's rows to the host, files them
there by request and block, and hands them on with each output: 15 µs a request and step, in the process that also launches the next step.
With 256 requests a card waits for it, and gives two thirds of its tokens. And it does so in its second model runner alone, which CPUs do
not have.

Here a step's rows are written on their device, at the slots that its tokens have in the KV cache (`route_slots`), and read once, at the
end of their response (`route_requests`).
"""

from __future__ import annotations

from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from mtpctl.rollout.vllm.patches.assign import assign
from mtpctl.rollout.vllm.patches.route_requests import SlotConnector
from mtpctl.rollout.vllm.patches.route_slots import SlotRecorder, Span, bytes_per_slot, bytes_per_token
from mtpctl.rollout.vllm.patches.version import require_pinned
from mtpctl.routes import Routes

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

_FETCH = "mtpctl_fetch_routes"


def install() -> bool:
    """Put recorders and connectors in the places of vLLM's; returns whether it was done now. May be called again.

    Raises UpstreamMoved for another release.
    """
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_worker import Worker

    if hasattr(Worker, _FETCH):
        return False
    require_pinned(__name__)
    _connect()
    if current_platform.is_cpu():
        _record_on_cpus()
    else:
        _record_on_cards()
    return True


def _connect() -> None:
    """In the core: whose rows are wanted, and the way to them."""
    from vllm.v1.core.sched import scheduler as scheduling
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.gpu_worker import Worker

    sized, update = EngineCore._initialize_kv_caches, Scheduler.update_from_output

    @wraps(sized)
    def _initialize_kv_caches(self: EngineCore, *args: Any, **kwargs: Any) -> Any:
        # Plugins are loaded within the core's `__init__`, so it is too late to wrap that one; the scheduler is made after this.
        SlotConnector.fetch_here = partial(_of_first, self.model_executor)
        return sized(self, *args, **kwargs)

    @wraps(update)
    def update_from_output(
        self: Scheduler, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        connector: object = self.aux_output_connector
        if isinstance(connector, SlotConnector) and connector.scheduler is None:
            assert SlotConnector.fetch_here is not None, "the core has sized its caches"
            connector.attach(self, SlotConnector.fetch_here)
        found = update(self, scheduler_output, model_runner_output)
        if isinstance(connector, SlotConnector):
            connector.deliver(found.values())
        return found

    def mtpctl_fetch_routes(self: Worker, spans: list[Span], under_way: bool) -> Routes | None:
        recorder = getattr(self.model_runner, "aux_output_connector", None)
        assert isinstance(recorder, SlotRecorder)
        return recorder.fetch(spans, under_way)

    assign(scheduling, AuxOutputSchedulerConnector=SlotConnector)
    assign(EngineCore, _initialize_kv_caches=_initialize_kv_caches)
    assign(Scheduler, update_from_output=update_from_output)
    assign(Worker, mtpctl_fetch_routes=mtpctl_fetch_routes)


def _of_first(executor: Any, spans: list[Span], under_way: bool) -> Routes:
    """The rows, from the one rank that has them."""
    answers = executor.collective_rpc(_FETCH, args=(spans, under_way))
    return next(each for each in answers if each is not None)


def _record_on_cards() -> None:
    """In vLLM's second model runner: a recorder in the place of its connector, and room for the rows beside the KV cache."""
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    prepare, room = GPUModelRunner.initialize_kv_cache, Worker.determine_available_memory

    def get_aux_output_connector(model: torch.nn.Module, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> SlotRecorder:
        return SlotRecorder(model=model, vllm_config=vllm_config, kv_cache_config=kv_cache_config)

    @wraps(prepare)
    def initialize_kv_cache(self: GPUModelRunner, *args: Any, **kwargs: Any) -> None:
        prepare(self, *args, **kwargs)
        recorder: object = self.aux_output_connector
        if isinstance(recorder, SlotRecorder):
            recorder.slots = self.block_tables.slot_mappings

    @wraps(room)
    def determine_available_memory(self: Worker) -> int:
        free = int(room(self))
        if not self.vllm_config.aux_output_config.enabled or self.cache_config.kv_cache_memory_bytes:
            return free
        rows, cached = bytes_per_slot(self.vllm_config), bytes_per_token(self.get_kv_cache_spec().values())
        return free * cached // (cached + rows)

    assign(model_runner, get_aux_output_connector=get_aux_output_connector)
    assign(GPUModelRunner, initialize_kv_cache=initialize_kv_cache)
    assign(Worker, determine_available_memory=determine_available_memory)


def _record_on_cpus() -> None:
    """In vLLM's first model runner, which upstream lets return no routes: the same recorder, after each step."""
    from vllm.config import VllmConfig
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    prepare, execute = CPUModelRunner.initialize_kv_cache, CPUModelRunner.execute_model

    def verify_aux_output_compatibility(self: VllmConfig) -> None:
        """Upstream's own refuses this model runner."""

    @wraps(prepare)
    def initialize_kv_cache(
        self: CPUModelRunner, kv_cache_config: KVCacheConfig, is_profiling: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        prepare(self, kv_cache_config, is_profiling, *args, **kwargs)
        if self.vllm_config.aux_output_config.enabled and not is_profiling:
            recorder = SlotRecorder(model=self.get_model(), vllm_config=self.vllm_config, kv_cache_config=kv_cache_config)
            vars(self)["aux_output_connector"] = recorder

    @wraps(execute)
    def execute_model(self: CPUModelRunner, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        result = execute(self, scheduler_output, *args, **kwargs)
        recorder = getattr(self, "aux_output_connector", None)
        if isinstance(recorder, SlotRecorder) and (count := scheduler_output.total_num_scheduled_tokens):
            # Sampling comes later, and drafting after it: these are still the slots of the target's tokens.
            recorder.write(self.input_batch.block_table[recorder.group].slot_mapping.gpu[:count])
        return result

    assign(VllmConfig, _verify_aux_output_compatibility=verify_aux_output_compatibility)
    assign(CPUModelRunner, initialize_kv_cache=initialize_kv_cache, execute_model=execute_model)
