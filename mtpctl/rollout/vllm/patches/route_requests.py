"""Which rows of routes belong to a request, and when they are read: at its end, at a preemption, before an abort (vLLM 0.32.0).

When a response ends, its rows are read while the next step runs: that step cannot write to slots that are still the response's. A preempted
request loses its slots, and an aborted one is about to, so their rows are read then. `routes` puts a connector into vLLM's scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np

from mtpctl.rollout.vllm.patches.logprobs import is_deferred
from mtpctl.rollout.vllm.patches.route_slots import Span, group_of
from mtpctl.routes import Routes

if TYPE_CHECKING:
    from vllm.distributed.aux_output_connector.connector import AuxRequestOutput
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.request import Request

Fetch = Callable[[list[Span], bool], Routes]
"""Reads rows, span after span. With True it waits for the steps that are under way: some of the rows may be theirs."""


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


def pending_of(scheduler: object, request_ids: list[str]) -> dict[str, tuple[bytes, str, tuple[int, ...]]]:
    """The rows of these requests, which are about to be aborted: bytes, type and sizes, which pass between processes."""
    connector = getattr(scheduler, "aux_output_connector", None)
    if not isinstance(connector, SlotConnector):
        return {}
    requests = cast("Scheduler", scheduler).requests
    # What others have was sent with each output.
    asked = [requests[each] for each in request_ids if each in requests and is_deferred(requests[each])]
    found = {each.request_id: connector.pending(each) for each in asked}
    return {each: (rows.tobytes(), rows.dtype.name, rows.shape) for each, rows in found.items()}


def as_rows(data: bytes, dtype: str, shape: Iterable[int]) -> Routes:
    """One answer of `pending_of` as an array."""
    return np.frombuffer(data, dtype).reshape(tuple(shape))
