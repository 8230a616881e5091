"""What responses that are cut short take with them (vLLM 0.32.0).

vLLM counts the drafts of each request in its scheduler, and tells them when the request ends by itself; an aborted one loses them,
and with partial rollouts that is every stretch but the last. Log-probs that travel late (`logprobs`) would be lost as well. Here
both are fetched just before the abort, and laid where vLLM's front end takes them from.
"""

from __future__ import annotations

from typing import Any

from mtpctl.rollout.vllm.patches import logprobs as vllm_logprobs
from mtpctl.rollout.vllm.patches.version import require_pinned


def install() -> bool:
    """Let the engine core answer for single requests; returns whether it was done now. May be called again.

    Raises UpstreamMoved for another release.
    """
    from vllm.v1.engine.core import EngineCore

    core: Any = EngineCore
    if hasattr(core, "mtpctl_so_far"):
        return False
    require_pinned(__name__)

    def mtpctl_so_far(self: Any, request_ids: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        found = {each: self.scheduler.requests[each].spec_decode_metrics for each in request_ids if each in self.scheduler.requests}
        counts = {each: (m.num_spec_tokens, m.histogram, m.num_draft_tokens) for each, m in found.items() if m is not None}
        return counts, vllm_logprobs.so_far(self.scheduler, request_ids)

    core.mtpctl_so_far = mtpctl_so_far
    return True


async def keep(llm: Any, request_ids: list[str]) -> None:
    """Have the outputs of these requests, about to be aborted, carry log-probs and what was drafted for them so far.

    `llm` is an `AsyncLLM`. The core goes on until the abort reaches it, so the last tokens may lack log-probs, and the last log-probs
    may be of tokens that its front end has not seen.
    """
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    processor = llm.output_processor
    inner = [each for request_id in request_ids for each in processor.external_req_ids.get(request_id, ())]
    if not inner:
        return
    counts, logprobs = await llm.engine_core.call_utility_async("mtpctl_so_far", inner)
    # One may have ended while the core was asked.
    for each, (limit, histogram, drafted) in counts.items():
        if (state := processor.request_states.get(each)) is not None:
            state.spec_decode_metrics = RequestSpecDecodeMetrics(limit, list(histogram), drafted)
    for each, rows in logprobs.items():
        if (state := processor.request_states.get(each)) is not None:
            vllm_logprobs.put(state.logprobs_processor, *rows)
