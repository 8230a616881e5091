"""Speculation counts of responses that are cut short (vLLM 0.32.0).

vLLM counts the drafts of each request in its scheduler, and tells them when the request ends by itself; an aborted one loses them,
and with partial rollouts that is every stretch but the last. Here they are fetched just before the abort, and laid where vLLM's
front end takes the counts of an output from.
"""

from __future__ import annotations

from typing import Any

from mtpctl.compat.vllm_version import require_pinned


def install() -> bool:
    """Let the engine core answer for the counts of single requests; returns whether it was done now. May be called again.

    Raises UpstreamMoved for another release.
    """
    from vllm.v1.engine.core import EngineCore

    core: Any = EngineCore
    if hasattr(core, "mtpctl_counts"):
        return False
    require_pinned(__name__)

    def mtpctl_counts(self: Any, request_ids: list[str]) -> dict[str, tuple[int, list[int], int]]:
        found = {each: self.scheduler.requests[each].spec_decode_metrics for each in request_ids if each in self.scheduler.requests}
        return {each: (m.num_spec_tokens, m.histogram, m.num_draft_tokens) for each, m in found.items() if m is not None}

    core.mtpctl_counts = mtpctl_counts
    return True


async def keep(llm: Any, request_ids: list[str]) -> None:
    """Have the outputs of these requests, about to be aborted, carry what was drafted for them so far. `llm` is an `AsyncLLM`."""
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    processor = llm.output_processor
    inner = [each for request_id in request_ids for each in processor.external_req_ids.get(request_id, ())]
    if not inner:
        return
    counts = await llm.engine_core.call_utility_async("mtpctl_counts", inner)
    for each, (limit, histogram, drafted) in counts.items():
        # One may have ended while the core was asked.
        if (state := processor.request_states.get(each)) is not None:
            state.spec_decode_metrics = RequestSpecDecodeMetrics(limit, list(histogram), drafted)
