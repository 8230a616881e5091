"""Routes of experts on a card: they stay beside the keys and values, and are read once, at the end of their response (vLLM 0.32.0).

vLLM copies every step's rows to the host, files them there by request and block, and hands them on with each output: 15 µs a request and
step, in the process that also launches the next step. With 256 requests the card waits for it, and gives two thirds of its tokens.

Here a step's rows are written on the card, at the slots that its tokens have in the KV cache. So what a prompt has in the prefix cache has
its rows, and those of rejected drafts are written over. When a response ends, its rows are read on a stream of their own, while the next
step runs: that step cannot write to slots that are still the response's. A preempted request loses its slots, and an aborted one is about
to, so their rows are read then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches.assign import assign
from mtpctl.rollout.vllm.patches.logprobs import is_deferred
from mtpctl.rollout.vllm.patches.version import require_pinned
from mtpctl.routes import Routes

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector.connector import AuxOutputConnectorMetadata, AuxRequestOutput
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.worker.gpu.input_batch import InputBatch

Span = tuple[list[int], int, int]
"""Blocks, from the one that holds the first token wanted on, and the positions of that token and of the one behind the last."""
Fetch = Callable[[list[Span], bool], Routes]
"""Reads rows, span after span. With True it waits for the steps that are under way: some of the rows may be theirs."""


def group_of(config: KVCacheConfig) -> int:
    """The KV cache's first group of layers that attend to every token, whose blocks are kept while their request lives.

    Raises UpstreamMoved where there is none.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

    for number, group in enumerate(config.kv_cache_groups):
        spec = group.kv_cache_spec
        if isinstance(spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec, FullAttentionSpec):
            return number
    raise UpstreamMoved(f"{__name__}: no layer attends to every token, and routes have no slots to stay in")


# --------------------------------------------------------------------------------------------------------------- the workers


class SlotRecorder:
    """In the place of vLLM's connector in a worker: rows by slot. The first tensor-parallel rank has them; the others only take part."""

    def __init__(self, *, vllm_config: VllmConfig, model: torch.nn.Module, kv_cache_config: KVCacheConfig) -> None:
        import torch
        from vllm.distributed.parallel_state import get_tp_group
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCapturer, bind_routed_experts_capturer

        self._capturer = RoutedExpertsCapturer(vllm_config.scheduler_config.max_num_batched_tokens, vllm_config)
        bind_routed_experts_capturer(model, self._capturer)
        self._group = group_of(kv_cache_config)
        self._block = kv_cache_config.kv_cache_groups[self._group].kv_cache_spec.block_size
        self._shape, self._dtype = self._capturer.shape_per_token, np.dtype(self._capturer.output_dtype_name)
        self._rows: torch.Tensor | None = None
        self._step = False
        self.slots: torch.Tensor | None = None
        """The slot of each token of a step, by group of layers."""
        if get_tp_group().is_first_rank:
            width, device = int(np.prod(self._shape)), self._capturer.device_buffer.device
            # Torch can hardly do anything with unsigned numbers of two bytes. Numbers of experts fit into signed ones.
            self._rows = torch.empty((kv_cache_config.num_blocks * self._block, width), dtype=_signed(self._dtype), device=device)
            self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def begin_step(self, metadata: AuxOutputConnectorMetadata | None) -> None:
        """A step with requests follows, and not one that only warms up."""
        self._step = True

    def prepare_output(self, input_batch: InputBatch) -> None:
        """Write the rows of the step that was just launched to their slots."""
        if self._rows is None or not self._step:
            return
        self._step = False
        assert self.slots is not None, "set with the KV cache"
        count = int(input_batch.query_start_loc_np[len(input_batch.req_ids)])
        rows = self._capturer.device_buffer[:count].flatten(1).to(self._rows.dtype)
        self._rows.index_copy_(0, self.slots[self._group, :count], rows)

    def fetch(self, spans: Sequence[Span], under_way: bool) -> Routes | None:
        """The rows of these spans, one after the other [tokens, layers, experts a token]; None on a rank that has none. See `Fetch`."""
        import torch

        if self._rows is None:
            return None
        slots = torch.from_numpy(np.concatenate([slots_of(*span, self._block) for span in spans]))
        if self._stream is None:
            rows = self._rows[slots]
        else:
            if under_way:
                torch.cuda.synchronize(self._rows.device)
            with torch.cuda.stream(self._stream):
                place = slots.pin_memory().to(self._rows.device, non_blocking=True)
                rows = self._rows.index_select(0, place).to("cpu", non_blocking=True)
                self._stream.synchronize()
        return rows.numpy().view(self._dtype).reshape(-1, *self._shape)

    def close(self) -> None:
        """Give the rows' memory back."""
        self._rows = None


def slots_of(blocks: Sequence[int], start: int, end: int, block: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The slots of positions `start` to `end`; `blocks` begins with the one of `start`, and each holds `block` tokens."""
    places = np.arange(start, end, dtype=np.int64)
    if end > start and (end - 1) // block - start // block >= len(blocks):
        raise UpstreamMoved(f"{__name__}: tokens {start} to {end} have {len(blocks)} blocks of {block}, and need more")
    return np.asarray(blocks, np.int64)[places // block - start // block] * block + places % block


def bytes_per_slot(config: VllmConfig) -> int:
    """What the rows of one token take on the card."""
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import _get_routed_experts_shape

    layers, experts, chosen = _get_routed_experts_shape(config)
    return int(layers * chosen * (1 if experts <= 256 else 2))


def _signed(dtype: np.dtype[Any]) -> torch.dtype:
    import torch

    return torch.uint8 if dtype.itemsize == 1 else torch.int16


# ------------------------------------------------------------------------------------------------------------------ the core


@dataclass(slots=True)
class Saved:
    """Rows that were read when their request was preempted, from position `first` on.

    Up to `settled` they are of tokens that the request had. Those behind are of the steps under way, whose tokens may still come.
    """

    first: int
    settled: int
    rows: Routes


class SlotConnector:
    """In the place of vLLM's connector in the scheduler: notes whose rows are wanted, and gives them to the outputs of a step."""

    fetch_here: ClassVar[Fetch | None] = None
    """Reads rows of this process's core."""

    def __init__(self) -> None:
        self.fetch: Fetch | None = None
        self.scheduler: Scheduler | None = None
        self._group, self._block = 0, 0
        self._sent: dict[str, int] = {}
        self._saved: dict[str, Saved] = {}
        self._wanted: list[tuple[str, Routes | None, Span]] = []

    def attach(self, scheduler: Scheduler, fetch: Fetch) -> None:
        """Work for this scheduler, and read rows with `fetch`."""
        config = scheduler.kv_cache_manager.kv_cache_config
        self.scheduler, self.fetch = scheduler, fetch
        self._group = group_of(config)
        self._block = config.kv_cache_groups[self._group].kv_cache_spec.block_size

    def build_connector_meta(self, scheduler_output: SchedulerOutput, requests: dict[str, Request]) -> None:
        """Workers need to be told nothing."""

    def take_output(self, request: Request, output: dict[str, AuxRequestOutput] | None) -> None:
        """Note a request's rows as wanted: all of a `DEFERRED` one at its end, of others those that are new with every output."""
        if is_deferred(request) and not request.is_finished():
            return
        start, end = self._due(request), request.num_tokens - 1
        saved = self._saved.get(request.request_id)
        before: Routes | None = None
        if saved is not None:
            blocks = self._blocks(request)
            # Without blocks it ends by a token of a step that was under way when it was preempted.
            until = saved.settled if blocks else min(end, saved.first + len(saved.rows))
            before, start = saved.rows[start - saved.first : until - saved.first], max(start, until)
        if end > start or before is not None:
            self._wanted.append((request.request_id, before, self._span(request, start, max(end, start))))
            self._sent[request.request_id] = max(end, start)

    def deliver(self, found: Iterable[EngineCoreOutputs]) -> None:
        """Give the outputs of a step the rows that were noted in it."""
        if not self._wanted:
            return
        assert self.fetch is not None
        wanted, self._wanted = self._wanted, []
        rows, place = self.fetch([span for _, _, span in wanted], False), 0
        by_request: dict[str, Routes] = {}
        for name, before, (_, start, end) in wanted:
            mine = rows[place : place + end - start]
            place += end - start
            by_request[name] = mine if before is None else np.concatenate([before, mine])
        for outputs in found:
            for output in outputs.outputs:
                if output.request_id in by_request:
                    output.routed_experts = by_request[output.request_id]

    def request_finished(self, request: Request) -> None:
        """A request ends, or is preempted: then its rows are read before its blocks are another's."""
        name = request.request_id
        if request.is_finished():
            self._sent.pop(name, None)
            self._saved.pop(name, None)
            return
        start, computed = self._due(request), request.num_computed_tokens
        saved, settled = self._saved.get(name), max(min(request.num_tokens - 1, computed), start)
        before: Routes | None = None
        if saved is not None:
            before, start = saved.rows[: saved.settled - saved.first], saved.settled
            settled = max(settled, start)
        if computed > start:
            rows = self._read([self._span(request, start, computed)])
            rows = rows if before is None else np.concatenate([before, rows])
            self._saved[name] = Saved(start if saved is None else saved.first, settled, rows)

    def reset(self) -> None:
        """The prefix cache is emptied; rows of requests under way stay where they are."""

    def pending(self, request: Request) -> Routes:
        """The rows of a request that is about to be aborted, which nobody has been given."""
        start, end = self._due(request), min(request.num_tokens - 1, request.num_computed_tokens)
        saved = self._saved.get(request.request_id)
        parts = []
        if saved is not None:
            parts.append(saved.rows[start - saved.first : saved.settled - saved.first])
            start = saved.settled
        if end > start or not parts:
            parts.append(self._read([self._span(request, start, max(start, end))]))
        return np.concatenate(parts)

    def _due(self, request: Request) -> int:
        """The position of the first row that nobody has been given."""
        assert request.sampling_params is not None
        first = min(request.sampling_params.routed_experts_prompt_start, request.num_prompt_tokens)
        return self._sent.get(request.request_id, first)

    def _blocks(self, request: Request) -> list[int]:
        assert self.scheduler is not None
        blocks: list[int] = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)[self._group]
        return blocks

    def _span(self, request: Request, start: int, end: int) -> Span:
        if end <= start:
            return [], start, start
        return self._blocks(request)[start // self._block : (end - 1) // self._block + 1], start, end

    def _read(self, spans: list[Span]) -> Routes:
        assert self.fetch is not None
        return self.fetch(spans, True)


def install() -> None:
    """Put recorder and connector in the places of vLLM's, and leave room for the rows beside the KV cache.

    Raises UpstreamMoved for another release.
    """
    require_pinned(__name__)
    from vllm.v1.core.sched import scheduler as scheduling
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    sized, prepare, update, room = (
        EngineCore._initialize_kv_caches,
        GPUModelRunner.initialize_kv_cache,
        Scheduler.update_from_output,
        Worker.determine_available_memory,
    )

    def get_aux_output_connector(model: torch.nn.Module, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> SlotRecorder:
        return SlotRecorder(model=model, vllm_config=vllm_config, kv_cache_config=kv_cache_config)

    @wraps(prepare)
    def initialize_kv_cache(self: GPUModelRunner, *args: Any, **kwargs: Any) -> None:
        prepare(self, *args, **kwargs)
        if isinstance(recorder := cast(object, self.aux_output_connector), SlotRecorder):
            recorder.slots = self.block_tables.slot_mappings

    @wraps(sized)
    def _initialize_kv_caches(self: EngineCore, *args: Any, **kwargs: Any) -> Any:
        # Plugins are loaded within the core's `__init__`, so it is too late to wrap that one; the scheduler is made after this.
        SlotConnector.fetch_here = partial(_of_first, self.model_executor)
        return sized(self, *args, **kwargs)

    @wraps(update)
    def update_from_output(
        self: Scheduler, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        connector = cast(object, self.aux_output_connector)
        if isinstance(connector, SlotConnector) and connector.scheduler is None:
            assert SlotConnector.fetch_here is not None, "the core has sized its caches"
            connector.attach(self, SlotConnector.fetch_here)
        found = update(self, scheduler_output, model_runner_output)
        if isinstance(connector, SlotConnector):
            connector.deliver(found.values())
        return found

    @wraps(room)
    def determine_available_memory(self: Worker) -> int:
        free = int(room(self))
        if not self.vllm_config.aux_output_config.enabled or self.cache_config.kv_cache_memory_bytes:
            return free
        rows, cached = bytes_per_slot(self.vllm_config), _bytes_per_token(self.get_kv_cache_spec().values())
        return free * cached // (cached + rows)

    def mtpctl_fetch_routes(self: Worker, spans: list[Span], under_way: bool) -> Routes | None:
        recorder = cast("GPUModelRunner", self.model_runner).aux_output_connector
        assert isinstance(cast(object, recorder), SlotRecorder)
        found: Routes | None = recorder.fetch(spans, under_way)  # type: ignore[union-attr]
        return found

    assign(model_runner, get_aux_output_connector=get_aux_output_connector)
    assign(scheduling, AuxOutputSchedulerConnector=SlotConnector)
    assign(GPUModelRunner, initialize_kv_cache=initialize_kv_cache)
    assign(EngineCore, _initialize_kv_caches=_initialize_kv_caches)
    assign(Scheduler, update_from_output=update_from_output)
    assign(Worker, determine_available_memory=determine_available_memory, mtpctl_fetch_routes=mtpctl_fetch_routes)


def _of_first(executor: Any, spans: list[Span], under_way: bool) -> Routes:
    """The rows, from the one rank that has them."""
    answers = executor.collective_rpc("mtpctl_fetch_routes", args=(spans, under_way))
    return next(each for each in answers if each is not None)


def _bytes_per_token(specs: Iterable[Any]) -> int:
    """Bytes that a token takes in the KV cache of layers that attend to every token."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return sum(spec.page_size_bytes // spec.block_size for spec in specs if isinstance(spec, FullAttentionSpec)) or 1
