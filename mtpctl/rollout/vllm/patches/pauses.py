"""Aborts and pauses of a vLLM engine (vLLM 0.32.0)."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from mtpctl.rollout.vllm.patches import logprobs as deferred_logprobs
from mtpctl.rollout.vllm.patches import route_requests
from mtpctl.rollout.vllm.patches.guard import assign, patch, require_pinned

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import PauseMode
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCore

DraftCounts = tuple[int, list[int], int]
"""`num_spec_tokens`, `histogram` and `num_draft_tokens` of vLLM's `RequestSpecDecodeMetrics`."""
PartialOutputs = tuple[dict[str, DraftCounts], dict[str, deferred_logprobs.Columns], dict[str, tuple[bytes, str, tuple[int, ...]]]]
"""Draft counts, deferred log-probs and routes by vLLM's internal request id."""


@patch
def install_partial_outputs() -> None:
    """Add a call to the engine core that returns log-probs, draft counts and routes of unfinished requests.

    vLLM reports a request's draft counts when it finishes, and loses them if it is aborted. With partial rollouts, every chunk of a
    response except the last is aborted. Deferred log-probs (`logprobs`) and routes (`routes`) would be lost as well.
    """
    from vllm.v1.engine.core import EngineCore

    assign(EngineCore, mtpctl_partial_outputs=_partial_outputs)


def _partial_outputs(self: EngineCore, request_ids: list[str]) -> PartialOutputs:
    requests = cast("Scheduler", self.scheduler).requests
    metrics = {each: requests[each].spec_decode_metrics for each in request_ids if each in requests}
    counts = {each: (m.num_spec_tokens, m.histogram, m.num_draft_tokens) for each, m in metrics.items() if m is not None}
    return counts, deferred_logprobs.pending_of(self.scheduler, request_ids), route_requests.pending_of(self.scheduler, request_ids)


async def fetch_partial_outputs(llm: AsyncLLM, request_ids: list[str]) -> None:
    """Fetch log-probs, draft counts and routes of requests that are about to be aborted, and put them where the front end reads them.

    The core continues to generate until the abort arrives. So the last tokens may lack log-probs, and the last log-probs may belong to
    tokens that the front end never gets.
    """
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    processor = llm.output_processor
    internal_ids = [each for request_id in request_ids for each in processor.external_req_ids.get(request_id, ())]
    if not internal_ids:
        return
    outputs: PartialOutputs = await llm.engine_core.call_utility_async("mtpctl_partial_outputs", internal_ids)
    counts, logprobs, routes = outputs
    # A request may have finished during the call.
    for each, (limit, histogram, drafted) in counts.items():
        if (state := processor.request_states.get(each)) is not None:
            state.spec_decode_metrics = RequestSpecDecodeMetrics(limit, list(histogram), drafted)
    for each, columns in logprobs.items():
        if (state := processor.request_states.get(each)) is not None and state.logprobs_processor is not None:
            deferred_logprobs.replace(state.logprobs_processor, *columns)
    for each, rows in routes.items():
        if (state := processor.request_states.get(each)) is not None:
            state.routed_experts_chunks = [route_requests.as_rows(*rows)]


async def pause(llm: AsyncLLM, mode: PauseMode, *, clear_cache: bool = True) -> None:
    """Pause as `AsyncLLM.pause_generation` does, without its sleep of 20 ms.

    `clear_cache`: False to keep the KV cache of running requests (`mtpctl.rollout.vllm.patches.prefixes`).

    vLLM sleeps after the engine core is paused, so that callers receive pending outputs first; its own comment says that nothing depends
    on it. Here the core attaches the weight version to every output, so the sleep would only lengthen each weight sync.

    Raises UpstreamMoved for another release.
    """
    require_pinned(f"{__name__}.pause")
    if clear_cache:
        await llm.renderer.clear_mm_cache_async()
    await llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)
