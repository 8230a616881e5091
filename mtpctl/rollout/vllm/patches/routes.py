"""Send the routes of a response with its last output (vLLM 0.32.0).

vLLM captures which experts the target's routers select, one row per token; drafters are not captured. Its second model runner, which CPUs
lack, copies every step's rows to the host, stores them there by request and block, and sends them with each output. This takes 15 µs per
request and step, in the process that also launches the next step: with 256 requests the GPU waits, and generates a third fewer tokens.

Here a step's rows stay on their device, in a tensor indexed by KV-cache slot, and are read once, at the end of their response
(or before a preemption or an abort). Rows of a prompt in the prefix cache are already there, and rows of rejected drafts are overwritten.

When a response ends, its rows are read while the next step runs, which cannot write to slots that still belong to the response. A request
loses its slots when it is preempted or aborted, so its rows are read just before that. `SlotConnector` does this in vLLM's scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches import assign, patch
from mtpctl.rollout.vllm.patches.logprobs import is_deferred
from mtpctl.routes import Routes

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector.connector import AuxOutputConnectorMetadata, AuxRequestOutput
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker


Span = tuple[list[int], int, int]
"""Tokens of a request: their KV-cache blocks, the position of the first token, and the position after the last."""
Fetch = Callable[[list[Span], bool], Routes]
"""Reads the rows of spans. If the flag is true, it first waits for steps in flight, which may write some of the rows."""


def find_full_attention_group(config: KVCacheConfig) -> int:
    """Find the KV cache's first group of full-attention layers, whose blocks are kept while their request runs.

    Raises UpstreamMoved if there is none.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

    for number, group in enumerate(config.kv_cache_groups):
        spec = group.kv_cache_spec
        if isinstance(spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec, FullAttentionSpec):
            return number
    raise UpstreamMoved(f"{__name__}: routes are stored by slot of a full-attention layer, but the model has no such layer")


@dataclass(slots=True)
class PreemptedRows:
    """Rows that were read when their request was preempted, beginning with position `first`.

    Rows from position `settled_end` on belong to steps in flight: their tokens may still be appended to the request, or be computed again.
    """

    first: int
    settled_end: int
    rows: Routes


class SlotConnector:
    """Replaces vLLM's connector in the scheduler: fetches the rows that a step's outputs need, and adds them to the outputs."""

    process_fetch: ClassVar[Fetch | None] = None
    """Reads rows in the workers of this process's engine core."""

    def __init__(self) -> None:
        self.fetch: Fetch | None = None
        self.scheduler: Scheduler | None = None
        self._group, self._block_size = 0, 0
        self._sent_end: dict[str, int] = {}
        self._preemptions: dict[str, PreemptedRows] = {}
        self._requested_rows: list[tuple[str, Routes | None, Span]] = []

    def attach(self, scheduler: Scheduler, fetch: Fetch) -> None:
        """Attach the connector to a scheduler, and read rows with `fetch`."""
        config = scheduler.kv_cache_manager.kv_cache_config
        self.scheduler, self.fetch = scheduler, fetch
        self._group = find_full_attention_group(config)
        self._block_size = config.kv_cache_groups[self._group].kv_cache_spec.block_size

    def build_connector_meta(self, scheduler_output: SchedulerOutput, requests: dict[str, Request]) -> None:
        """Workers need no metadata."""

    def take_output(self, request: Request, output: dict[str, AuxRequestOutput] | None) -> None:
        """Request rows for an output: all rows of a `DEFERRED` request at its end, new rows with every output of others."""
        if is_deferred(request) and not request.is_finished():
            return
        start, end = self._first_unsent_position(request), request.num_tokens - 1
        preemption = self._preemptions.get(request.request_id)
        saved_rows: Routes | None = None
        if preemption is not None:
            blocks = self._blocks(request)
            # A request without blocks is still preempted. It ended with a token of a step that was in flight when it was preempted.
            saved_end = preemption.settled_end if blocks else min(end, preemption.first + len(preemption.rows))
            saved_rows, start = preemption.rows[start - preemption.first : saved_end - preemption.first], max(start, saved_end)
        if end > start or saved_rows is not None:
            self._requested_rows.append((request.request_id, saved_rows, self._span(request, start, max(end, start))))
            self._sent_end[request.request_id] = max(end, start)

    def add_to_outputs(self, by_client: Iterable[EngineCoreOutputs]) -> None:
        """Add the rows requested during a step to its outputs."""
        if not self._requested_rows:
            return
        assert self.fetch is not None
        requested_rows, self._requested_rows = self._requested_rows, []
        rows, offset = self.fetch([span for _, _, span in requested_rows], False), 0
        by_request: dict[str, Routes] = {}
        for request_id, saved_rows, (_, start, end) in requested_rows:
            new_rows = rows[offset : offset + end - start]
            offset += end - start
            by_request[request_id] = new_rows if saved_rows is None else np.concatenate([saved_rows, new_rows])
        for outputs in by_client:
            for output in outputs.outputs:
                if output.request_id in by_request:
                    output.routed_experts = by_request[output.request_id]

    def request_finished(self, request: Request) -> None:
        """Called when a request ends or is preempted. If it is preempted, its rows are read before its blocks are reused."""
        request_id = request.request_id
        if request.is_finished():
            self._sent_end.pop(request_id, None)
            self._preemptions.pop(request_id, None)
            return
        start, computed_end = self._first_unsent_position(request), request.num_computed_tokens
        if request.num_tokens == request.num_prompt_tokens and computed_end < request.num_tokens:
            # A request that is preempted during prefill repeats it, so its rows are not needed.
            return
        preemption, settled_end = self._preemptions.get(request_id), max(min(request.num_tokens - 1, computed_end), start)
        saved_rows: Routes | None = None
        if preemption is not None:
            saved_rows, start = preemption.rows[: preemption.settled_end - preemption.first], preemption.settled_end
            settled_end = max(settled_end, start)
        if computed_end > start:
            rows = self._read([self._span(request, start, computed_end)])
            rows = rows if saved_rows is None else np.concatenate([saved_rows, rows])
            self._preemptions[request_id] = PreemptedRows(start if preemption is None else preemption.first, settled_end, rows)

    def reset(self) -> None:
        """Called when the prefix cache is cleared. Rows of running requests are unaffected."""

    def read_unsent_rows(self, request: Request) -> Routes:
        """Read the unsent rows of a request that is about to be aborted."""
        start, end = self._first_unsent_position(request), min(request.num_tokens - 1, request.num_computed_tokens)
        preemption = self._preemptions.get(request.request_id)
        chunks = []
        if preemption is not None:
            chunks.append(preemption.rows[start - preemption.first : preemption.settled_end - preemption.first])
            start = preemption.settled_end
        if end > start or not chunks:
            chunks.append(self._read([self._span(request, start, max(start, end))]))
        return np.concatenate(chunks)

    def _first_unsent_position(self, request: Request) -> int:
        """The position of the first unsent row."""
        assert request.sampling_params is not None
        first = min(request.sampling_params.routed_experts_prompt_start, request.num_prompt_tokens)
        return self._sent_end.get(request.request_id, first)

    def _blocks(self, request: Request) -> list[int]:
        assert self.scheduler is not None
        blocks: list[int] = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)[self._group]
        return blocks

    def _span(self, request: Request, start: int, end: int) -> Span:
        if end <= start:
            return [], start, start
        return self._blocks(request)[start // self._block_size : (end - 1) // self._block_size + 1], start, end

    def _read(self, spans: list[Span]) -> Routes:
        assert self.fetch is not None
        return self.fetch(spans, True)


def serialize_unsent_rows(scheduler: object, request_ids: list[str]) -> dict[str, tuple[bytes, str, tuple[int, ...]]]:
    """Read the unsent rows of requests that are about to be aborted. Returns their bytes, type and shape by request id."""
    connector = getattr(scheduler, "aux_output_connector", None)
    if not isinstance(connector, SlotConnector):
        return {}
    requests = cast("Scheduler", scheduler).requests
    # Other requests got their rows with each output.
    deferred_requests = [requests[request_id] for request_id in request_ids if request_id in requests and is_deferred(requests[request_id])]
    unsent_rows = {request.request_id: connector.read_unsent_rows(request) for request in deferred_requests}
    return {request_id: (rows.tobytes(), rows.dtype.name, rows.shape) for request_id, rows in unsent_rows.items()}


def deserialize_rows(data: bytes, dtype: str, shape: Iterable[int]) -> Routes:
    """Convert one result of `serialize_unsent_rows` back to an array."""
    return np.frombuffer(data, dtype).reshape(tuple(shape))


_FETCH = "mtpctl_fetch_routes"


@patch
def install_routes() -> None:
    """Replace vLLM's connectors for routes: `SlotRecorder` in each worker, `SlotConnector` in the scheduler."""
    from vllm.platforms import current_platform

    _connect()
    if current_platform.is_cpu():
        _record_on_cpu()
    else:
        _record_on_gpu()


def _connect() -> None:
    """In the core: request rows for outputs, and fetch them from the workers."""
    from vllm.v1.core.sched import scheduler as scheduling
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.gpu_worker import Worker

    initialize_kv_caches, upstream_update = EngineCore._initialize_kv_caches, Scheduler.update_from_output

    @wraps(initialize_kv_caches)
    def _initialize_kv_caches(self: EngineCore, *args: Any, **kwargs: Any) -> Any:
        # `__init__` cannot be wrapped, because it loads the plugin that installs this patch. It calls this method before it creates the
        # scheduler.
        SlotConnector.process_fetch = partial(_fetch_from_first_rank, self.model_executor)
        return initialize_kv_caches(self, *args, **kwargs)

    @wraps(upstream_update)
    def update_from_output(
        self: Scheduler, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        connector: object = self.aux_output_connector
        if isinstance(connector, SlotConnector) and connector.scheduler is None:
            assert SlotConnector.process_fetch is not None, "the core has sized its caches"
            connector.attach(self, SlotConnector.process_fetch)
        by_client = upstream_update(self, scheduler_output, model_runner_output)
        if isinstance(connector, SlotConnector):
            connector.add_to_outputs(by_client.values())
        return by_client

    def mtpctl_fetch_routes(self: Worker, spans: list[Span], in_flight: bool) -> Routes | None:
        recorder = getattr(self.model_runner, "aux_output_connector", None)
        assert isinstance(recorder, SlotRecorder)
        return recorder.fetch(spans, in_flight)

    assign(scheduling, AuxOutputSchedulerConnector=SlotConnector)
    assign(EngineCore, _initialize_kv_caches=_initialize_kv_caches)
    assign(Scheduler, update_from_output=update_from_output)
    assign(Worker, mtpctl_fetch_routes=mtpctl_fetch_routes)


def _fetch_from_first_rank(executor: Any, spans: list[Span], in_flight: bool) -> Routes:
    """Fetch rows from the rank that stores them."""
    results = executor.collective_rpc(_FETCH, args=(spans, in_flight))
    return next(rows for rows in results if rows is not None)


def _record_on_gpu() -> None:
    """In vLLM's second model runner: replace its connector, and reserve memory for the rows next to the KV cache."""
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    upstream_initialize, upstream_available = GPUModelRunner.initialize_kv_cache, Worker.determine_available_memory

    def get_aux_output_connector(model: torch.nn.Module, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> SlotRecorder:
        return SlotRecorder(model=model, vllm_config=vllm_config, kv_cache_config=kv_cache_config)

    @wraps(upstream_initialize)
    def initialize_kv_cache(self: GPUModelRunner, *args: Any, **kwargs: Any) -> None:
        upstream_initialize(self, *args, **kwargs)
        recorder: object = self.aux_output_connector
        if isinstance(recorder, SlotRecorder):
            recorder.slots = self.block_tables.slot_mappings

    @wraps(upstream_available)
    def determine_available_memory(self: Worker) -> int:
        free_bytes = int(upstream_available(self))
        if not self.vllm_config.aux_output_config.enabled or self.cache_config.kv_cache_memory_bytes:
            return free_bytes
        row_bytes, kv_bytes = route_bytes_per_token(self.vllm_config), kv_bytes_per_token(self.get_kv_cache_spec().values())
        return free_bytes * kv_bytes // (kv_bytes + row_bytes)

    assign(model_runner, get_aux_output_connector=get_aux_output_connector)
    assign(GPUModelRunner, initialize_kv_cache=initialize_kv_cache)
    assign(Worker, determine_available_memory=determine_available_memory)


def _record_on_cpu() -> None:
    """In vLLM's first model runner, which returns no routes upstream: call the recorder after each step."""
    from vllm.config import VllmConfig
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    upstream_initialize, upstream_execute = CPUModelRunner.initialize_kv_cache, CPUModelRunner.execute_model

    def verify_aux_output_compatibility(self: VllmConfig) -> None:
        """Upstream rejects this model runner."""

    @wraps(upstream_initialize)
    def initialize_kv_cache(
        self: CPUModelRunner, kv_cache_config: KVCacheConfig, is_profiling: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        upstream_initialize(self, kv_cache_config, is_profiling, *args, **kwargs)
        if self.vllm_config.aux_output_config.enabled and not is_profiling:
            recorder = SlotRecorder(model=self.get_model(), vllm_config=self.vllm_config, kv_cache_config=kv_cache_config)
            vars(self)["aux_output_connector"] = recorder

    @wraps(upstream_execute)
    def execute_model(self: CPUModelRunner, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        result = upstream_execute(self, scheduler_output, *args, **kwargs)
        recorder = getattr(self, "aux_output_connector", None)
        if isinstance(recorder, SlotRecorder) and (count := scheduler_output.total_num_scheduled_tokens):
            # Drafting, which changes the slots, follows after this call.
            recorder.write(self.input_batch.block_table[recorder.group].slot_mapping.gpu[:count])
        return result

    assign(VllmConfig, _verify_aux_output_compatibility=verify_aux_output_compatibility)
    assign(CPUModelRunner, initialize_kv_cache=initialize_kv_cache, execute_model=execute_model)


class SlotRecorder:
    """Replaces vLLM's connector in a worker: stores rows by slot, on the first tensor-parallel rank."""

    def __init__(self, *, vllm_config: VllmConfig, model: torch.nn.Module, kv_cache_config: KVCacheConfig) -> None:
        import torch
        from vllm.distributed.parallel_state import get_tp_group
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCapturer, bind_routed_experts_capturer

        self._capturer = RoutedExpertsCapturer(vllm_config.scheduler_config.max_num_batched_tokens, vllm_config)
        bind_routed_experts_capturer(model, self._capturer)
        self.group = find_full_attention_group(kv_cache_config)
        """The group of layers whose slots index the rows."""
        self._block_size = kv_cache_config.kv_cache_groups[self.group].kv_cache_spec.block_size
        self._shape, self._dtype = self._capturer.shape_per_token, np.dtype(self._capturer.output_dtype_name)
        self._rows: torch.Tensor | None = None
        self._in_step = False
        self.slots: torch.Tensor | None = None
        """Second model runner: the slot of each token of a step, by group of layers."""
        if get_tp_group().is_first_rank:
            width, device = int(np.prod(self._shape)), self._capturer.device_buffer.device
            # Rows are stored as int16, because torch supports few operations on uint16.
            self._rows = torch.empty(
                (kv_cache_config.num_blocks * self._block_size, width), dtype=_storage_dtype(self._dtype), device=device
            )
            self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def begin_step(self, metadata: AuxOutputConnectorMetadata | None) -> None:
        """Called by the second model runner before a step with requests, not before warm-up steps."""
        self._in_step = True

    def prepare_output(self, input_batch: InputBatch) -> None:
        """Called by the second model runner after it has launched a step."""
        if not self._in_step:
            return
        self._in_step = False
        assert self.slots is not None, "set with the KV cache"
        self.write(self.slots[self.group, : int(input_batch.query_start_loc_np[len(input_batch.req_ids)])])

    def write(self, slots: torch.Tensor) -> None:
        """Write the rows of the step that was just launched to the slots of its tokens [tokens]."""
        if self._rows is not None:
            rows = self._capturer.device_buffer[: len(slots)].flatten(1).to(self._rows.dtype)
            self._rows.index_copy_(0, slots, rows)

    def fetch(self, spans: Sequence[Span], in_flight: bool) -> Routes | None:
        """The concatenated rows of these spans [tokens, layers, experts per token]; None on a rank without rows.

        With `in_flight`, first waits for launched steps, which may write some of the rows.
        """
        import torch

        if self._rows is None:
            return None
        slots = torch.from_numpy(np.concatenate([slots_of(*span, self._block_size) for span in spans]))
        if self._stream is None:
            rows = self._rows[slots]
        else:
            if in_flight:
                torch.cuda.synchronize(self._rows.device)
            with torch.cuda.stream(self._stream):
                index = slots.pin_memory().to(self._rows.device, non_blocking=True)
                rows = self._rows.index_select(0, index).to("cpu", non_blocking=True)
                self._stream.synchronize()
        return rows.numpy().view(self._dtype).reshape(-1, *self._shape)

    def close(self) -> None:
        """Free the rows' memory."""
        self._rows = None


def slots_of(blocks: Sequence[int], start: int, end: int, block_size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Slots of the positions from `start` up to, but not including, `end`. `blocks` begins with the block of `start`."""
    positions = np.arange(start, end, dtype=np.int64)
    if end > start and (end - 1) // block_size - start // block_size >= len(blocks):
        raise UpstreamMoved(f"{__name__}: tokens {start} to {end} need more than {len(blocks)} blocks of {block_size} tokens")
    return np.asarray(blocks, np.int64)[positions // block_size - start // block_size] * block_size + positions % block_size


def route_bytes_per_token(config: VllmConfig) -> int:
    """Bytes of one token's row on the GPU."""
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import _get_routed_experts_shape

    layers, experts, top_k = _get_routed_experts_shape(config)
    return int(layers * top_k * (1 if experts <= 256 else 2))


def _storage_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    import torch

    return torch.uint8 if dtype.itemsize == 1 else torch.int16


def kv_bytes_per_token(specs: Iterable[Any]) -> int:
    """Bytes of one token in the KV cache of full-attention layers; 1 if there is no such layer."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return sum(spec.page_size_bytes // spec.block_size for spec in specs if isinstance(spec, FullAttentionSpec)) or 1
