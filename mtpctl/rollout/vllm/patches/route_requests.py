"""Which rows of routes belong to a request, and when they are read: at its end, at a preemption, before an abort (vLLM 0.32.0).

When a response ends, its rows are read while the next step runs, which cannot write to slots that still belong to the response. A request
loses its slots when it is preempted or aborted, so its rows are read just before. `routes` puts `SlotConnector` into vLLM's scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches.logprobs import is_deferred
from mtpctl.routes import Routes

if TYPE_CHECKING:
    from vllm.distributed.aux_output_connector.connector import AuxRequestOutput
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

Span = tuple[list[int], int, int]
"""Blocks, beginning with that of the first token, and the positions of the first token and of the one after the last."""
Fetch = Callable[[list[Span], bool], Routes]
"""Reads rows of spans. With True it first waits for steps in flight, which may write some of the rows."""


def group_of(config: KVCacheConfig) -> int:
    """Index of the KV cache's first group of full-attention layers, whose blocks are kept while their request runs.

    Raises UpstreamMoved if there is none.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

    for number, group in enumerate(config.kv_cache_groups):
        spec = group.kv_cache_spec
        if isinstance(spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec, FullAttentionSpec):
            return number
    raise UpstreamMoved(f"{__name__}: no layer attends to every token, and routes have no slots to stay in")


@dataclass(slots=True)
class Saved:
    """Rows read when their request was preempted, beginning with position `first`.

    Rows before `settled` belong to tokens that the request had. Later ones belong to steps in flight, whose tokens may still arrive.
    """

    first: int
    settled: int
    rows: Routes


class SlotConnector:
    """Replaces vLLM's connector in the scheduler: collects which rows a step's outputs need, and adds them."""

    fetch_here: ClassVar[Fetch | None] = None
    """Reads rows for the engine core in this process."""

    def __init__(self) -> None:
        self.fetch: Fetch | None = None
        self.scheduler: Scheduler | None = None
        self._group, self._block = 0, 0
        self._sent: dict[str, int] = {}
        self._saved: dict[str, Saved] = {}
        self._wanted: list[tuple[str, Routes | None, Span]] = []

    def attach(self, scheduler: Scheduler, fetch: Fetch) -> None:
        """Serve this scheduler, and read rows with `fetch`."""
        config = scheduler.kv_cache_manager.kv_cache_config
        self.scheduler, self.fetch = scheduler, fetch
        self._group = group_of(config)
        self._block = config.kv_cache_groups[self._group].kv_cache_spec.block_size

    def build_connector_meta(self, scheduler_output: SchedulerOutput, requests: dict[str, Request]) -> None:
        """Workers need no metadata."""

    def take_output(self, request: Request, output: dict[str, AuxRequestOutput] | None) -> None:
        """Request rows for an output: all rows of a `DEFERRED` request at its end, new rows with every output of others."""
        if is_deferred(request) and not request.is_finished():
            return
        start, end = self._due(request), request.num_tokens - 1
        saved = self._saved.get(request.request_id)
        before: Routes | None = None
        if saved is not None:
            blocks = self._blocks(request)
            # A request without blocks ends with a token of a step that was in flight at its preemption.
            until = saved.settled if blocks else min(end, saved.first + len(saved.rows))
            before, start = saved.rows[start - saved.first : until - saved.first], max(start, until)
        if end > start or before is not None:
            self._wanted.append((request.request_id, before, self._span(request, start, max(end, start))))
            self._sent[request.request_id] = max(end, start)

    def deliver(self, by_client: Iterable[EngineCoreOutputs]) -> None:
        """Add the rows requested during a step to its outputs."""
        if not self._wanted:
            return
        assert self.fetch is not None
        wanted, self._wanted = self._wanted, []
        rows, offset = self.fetch([span for _, _, span in wanted], False), 0
        by_request: dict[str, Routes] = {}
        for name, before, (_, start, end) in wanted:
            own = rows[offset : offset + end - start]
            offset += end - start
            by_request[name] = own if before is None else np.concatenate([before, own])
        for outputs in by_client:
            for output in outputs.outputs:
                if output.request_id in by_request:
                    output.routed_experts = by_request[output.request_id]

    def request_finished(self, request: Request) -> None:
        """Called when a request ends or is preempted; in the latter case its rows are read before its blocks are reused."""
        name = request.request_id
        if request.is_finished():
            self._sent.pop(name, None)
            self._saved.pop(name, None)
            return
        start, computed = self._due(request), request.num_computed_tokens
        if request.num_tokens == request.num_prompt_tokens and computed < request.num_tokens:
            # Preempted within its prefill, which is computed again, perhaps with newer weights, before the first token is sampled.
            return
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
        """Called when the prefix cache is cleared. Rows of running requests are unaffected."""

    def pending(self, request: Request) -> Routes:
        """The unsent rows of a request that is about to be aborted."""
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
        """The position of the first unsent row."""
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


def pending_of(scheduler: object, request_ids: list[str]) -> dict[str, tuple[bytes, str, tuple[int, ...]]]:
    """The unsent rows of requests that are about to be aborted, serialized as bytes, type and shape."""
    connector = getattr(scheduler, "aux_output_connector", None)
    if not isinstance(connector, SlotConnector):
        return {}
    requests = cast("Scheduler", scheduler).requests
    # Rows of other requests were sent with each output.
    deferred = [requests[each] for each in request_ids if each in requests and is_deferred(requests[each])]
    pending = {each.request_id: connector.pending(each) for each in deferred}
    return {each: (rows.tobytes(), rows.dtype.name, rows.shape) for each, rows in pending.items()}


def as_rows(data: bytes, dtype: str, shape: Iterable[int]) -> Routes:
    """Deserialize one result of `pending_of`."""
    return np.frombuffer(data, dtype).reshape(tuple(shape))
