"""Pauses and aborts of a vLLM engine, and a prefix cache that does not mix weight versions (vLLM 0.32.0).

In vLLM, a pause with `clear_cache=False` keeps not only the blocks of running requests but also the prefix cache, so that later requests
reuse blocks that earlier weights computed. With the patch such a pause starts a new era. The era is part of the cache salt of every request
that starts afterwards, so that requests reuse only blocks of the same era. Blocks of earlier eras are evicted when memory is needed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

from mtpctl.rollout.vllm.patches import assign, patch, require_pinned
from mtpctl.rollout.vllm.patches import logprobs as deferred_logprobs
from mtpctl.rollout.vllm.patches import routes as deferred_routes

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import PauseMode
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request


DraftCounts = tuple[int, list[int], int]
"""`num_spec_tokens`, `histogram` and `num_draft_tokens` of vLLM's `RequestSpecDecodeMetrics`."""
PartialOutputs = tuple[dict[str, DraftCounts], dict[str, deferred_logprobs.Columns], dict[str, tuple[bytes, str, tuple[int, ...]]]]
"""Draft counts, deferred log-probs and routes by vLLM's internal request id."""


@patch
def install_partial_outputs() -> None:
    """Add a call to the engine core that returns log-probs, draft counts and routes of unfinished requests.

    vLLM reports a request's draft counts when it finishes, and loses them if it is aborted. With partial rollouts, every chunk of a
    response except the last is aborted. Deferred log-probs (`patches.logprobs`) and routes (`patches.routes`) would be lost as well.
    """
    from vllm.v1.engine.core import EngineCore

    assign(EngineCore, mtpctl_partial_outputs=_partial_outputs)


def _partial_outputs(self: EngineCore, request_ids: list[str]) -> PartialOutputs:
    requests = cast("Scheduler", self.scheduler).requests
    metrics = {request_id: requests[request_id].spec_decode_metrics for request_id in request_ids if request_id in requests}
    counts = {
        request_id: (metric.num_spec_tokens, metric.histogram, metric.num_draft_tokens)
        for request_id, metric in metrics.items()
        if metric is not None
    }
    return (
        counts,
        deferred_logprobs.read_stored_logprobs(self.scheduler, request_ids),
        deferred_routes.serialize_unsent_rows(self.scheduler, request_ids),
    )


async def fetch_partial_outputs(llm: AsyncLLM, request_ids: list[str]) -> None:
    """Fetch log-probs, draft counts and routes of requests that are about to be aborted, and store them in the front end's request states.

    The core continues to generate until the abort arrives. So the last tokens may lack log-probs, and the last log-probs may belong to
    tokens that the front end never gets.
    """
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    processor = llm.output_processor
    internal_ids = [internal_id for request_id in request_ids for internal_id in processor.external_req_ids.get(request_id, ())]
    if not internal_ids:
        return
    outputs: PartialOutputs = await llm.engine_core.call_utility_async("mtpctl_partial_outputs", internal_ids)
    counts, logprobs, routes = outputs
    # A request may have finished during the call.
    for internal_id, (num_spec_tokens, histogram, num_draft_tokens) in counts.items():
        if (state := processor.request_states.get(internal_id)) is not None:
            state.spec_decode_metrics = RequestSpecDecodeMetrics(num_spec_tokens, list(histogram), num_draft_tokens)
    for internal_id, columns in logprobs.items():
        if (state := processor.request_states.get(internal_id)) is not None and state.logprobs_processor is not None:
            deferred_logprobs.replace_logprobs(state.logprobs_processor, *columns)
    for internal_id, rows in routes.items():
        if (state := processor.request_states.get(internal_id)) is not None:
            state.routed_experts_chunks = [deferred_routes.deserialize_rows(*rows)]


async def pause(llm: AsyncLLM, mode: PauseMode, *, clear_cache: bool = True) -> None:
    """Pause as `AsyncLLM.pause_generation` does, without its sleep of 20 ms.

    `clear_cache`: False to keep the KV cache of running requests.

    The sleep gives callers time to receive pending outputs before the pause returns. Here it would only lengthen weight syncs: the engine
    core attaches the weight version to every output, so the order in which outputs arrive does not matter.

    Raises UpstreamMoved for another release.
    """
    require_pinned(f"{__name__}.pause")
    if clear_cache:
        await llm.renderer.clear_mm_cache_async()
    await llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)


_ERA = "mtpctl_era"
_REQUEST_SALT = "mtpctl_request_salt"


@patch
def install_prefix_eras() -> None:
    """Start an era at each pause that keeps the cache, and add the era to the salt of new requests."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    upstream_finish_pause, upstream_add_request = EngineCore._finish_pause, Scheduler.add_request

    def _finish_pause(self: EngineCore, clear_cache: bool) -> None:
        upstream_finish_pause(self, clear_cache)
        if not clear_cache:
            start_era(cast("Scheduler", self.scheduler))

    def add_request(self: Scheduler, request: Request) -> None:
        if era := self.__dict__.get(_ERA, 0):
            _set_salt(request, era)
        upstream_add_request(self, request)

    assign(EngineCore, _finish_pause=_finish_pause)
    assign(Scheduler, add_request=add_request)


def start_era(scheduler: Scheduler) -> None:
    """Start a new era for all requests without KV blocks. Requests in the middle of their prefill lose their blocks.

    A running request that has sampled a token keeps its blocks and its era. A request that was preempted before the sync continues in the
    new era. No step may be in flight.
    """
    era = scheduler.__dict__[_ERA] = scheduler.__dict__.get(_ERA, 0) + 1
    # The first token of a request is attributed to one version, so a prefill with old weights must not continue with new weights.
    prefilling_requests = [request for request in scheduler.running if not request.num_output_tokens]
    scheduler.running = [request for request in scheduler.running if request.num_output_tokens]
    now = time.monotonic()
    for request in reversed(prefilling_requests):
        scheduler._preempt_request(request, now, drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    for request in scheduler.requests.values():
        if not request.num_computed_tokens:
            _set_salt(request, era)


def _set_salt(request: Request, era: int) -> None:
    request_salt = request.__dict__.setdefault(_REQUEST_SALT, request.cache_salt or "")
    request.cache_salt = f"mtpctl-{era}:{request_salt}"
    request.block_hashes.clear()
    request.update_block_hashes()
