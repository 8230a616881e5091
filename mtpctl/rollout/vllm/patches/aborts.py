"""Log-probs, draft counts and routes of responses that are aborted (vLLM 0.32.0).

vLLM counts the drafts of each request in its scheduler and reports them when the request ends by itself. An aborted request loses them,
and with partial rollouts every chunk of a response but the last one is aborted. Deferred log-probs (`logprobs`) and routes (`routes`)
would be lost as well. Here all are fetched just before the abort, and put where vLLM's front end looks for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from mtpctl.rollout.vllm.patches import logprobs as deferred_logprobs
from mtpctl.rollout.vllm.patches import route_requests
from mtpctl.rollout.vllm.patches.assign import assign
from mtpctl.rollout.vllm.patches.version import require_pinned

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCore

DraftCounts = tuple[int, list[int], int]
"""`num_spec_tokens`, `histogram` and `num_draft_tokens` of vLLM's `RequestSpecDecodeMetrics`."""
PartialOutputs = tuple[dict[str, DraftCounts], dict[str, deferred_logprobs.Columns], dict[str, tuple[bytes, str, tuple[int, ...]]]]
"""Draft counts, deferred log-probs and routes by vLLM's internal request id."""


def install() -> bool:
    """Let the engine core answer for unfinished requests; returns whether it was done now. May be called again.

    Raises UpstreamMoved for another release.
    """
    from vllm.v1.engine.core import EngineCore

    if hasattr(EngineCore, "mtpctl_partial_outputs"):
        return False
    require_pinned(__name__)
    assign(EngineCore, mtpctl_partial_outputs=_partial_outputs)
    return True


def _partial_outputs(self: EngineCore, request_ids: list[str]) -> PartialOutputs:
    requests = cast("Scheduler", self.scheduler).requests
    found = {each: requests[each].spec_decode_metrics for each in request_ids if each in requests}
    counts = {each: (m.num_spec_tokens, m.histogram, m.num_draft_tokens) for each, m in found.items() if m is not None}
    return counts, deferred_logprobs.pending_of(self.scheduler, request_ids), route_requests.pending_of(self.scheduler, request_ids)


async def fetch_partial_outputs(llm: AsyncLLM, request_ids: list[str]) -> None:
    """Have the outputs of these requests, about to be aborted, carry their log-probs, draft counts and routes so far.

    The core goes on generating until the abort reaches it. So the last tokens may lack log-probs, and the last log-probs may belong to
    tokens that the front end has not seen.
    """
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    processor = llm.output_processor
    inner = [each for request_id in request_ids for each in processor.external_req_ids.get(request_id, ())]
    if not inner:
        return
    outputs: PartialOutputs = await llm.engine_core.call_utility_async("mtpctl_partial_outputs", inner)
    counts, logprobs, routes = outputs
    # A request may have ended while the core was asked.
    for each, (limit, histogram, drafted) in counts.items():
        if (state := processor.request_states.get(each)) is not None:
            state.spec_decode_metrics = RequestSpecDecodeMetrics(limit, list(histogram), drafted)
    for each, columns in logprobs.items():
        if (state := processor.request_states.get(each)) is not None and state.logprobs_processor is not None:
            deferred_logprobs.replace(state.logprobs_processor, *columns)
    for each, rows in routes.items():
        if (state := processor.request_states.get(each)) is not None:
            state.routed_experts_chunks = [route_requests.as_rows(*rows)]
