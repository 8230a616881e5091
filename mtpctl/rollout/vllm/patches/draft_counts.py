"""Count of a response's drafts those alone that could be taken (vLLM 0.32.0).

vLLM counts a request's drafts when a step is verified, and cuts the step's tokens at the end of the response afterwards. Drafts that
fall behind the end are counted all the same, most as rejected, since nobody has learned what comes there: a drafter that is always
right shows some percent of misses, more the shorter the responses. Here the count of the last step is cut with its tokens.

Where a stop string ends a response, the front end finds it, and what the scheduler has counted never gets there. So of requests with
stop strings every output brings the count along.

The last step's count travels in the lists that vLLM's level `detailed` keeps for every step.
"""

from __future__ import annotations

from typing import Any

from mtpctl.rollout.vllm.patches.version import require_pinned

_MARK = "_mtpctl_counts"
_NEW = "_mtpctl_new"
_TOLD = "_mtpctl_told"


def install() -> bool:
    """Put the count in place; returns whether it was done now. May be called again.

    Raises UpstreamMoved for another release.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    metrics, scheduler, processor = (_any(each) for each in (RequestSpecDecodeMetrics, Scheduler, OutputProcessor))
    if hasattr(metrics.observe, _MARK):
        return False
    require_pinned(__name__)
    observe, append, update = metrics.observe, scheduler._update_request_with_output, scheduler.update_from_output
    trim = processor._trim_surplus_tokens

    def observed(self: Any, num_draft_tokens: int, num_accepted: int, detailed: bool = False) -> None:
        observe(self, num_draft_tokens, num_accepted, detailed)
        if not detailed:
            _last_step(self, num_draft_tokens, num_accepted)
            setattr(self, _NEW, True)

    def appended(self: Any, request: Any, new_token_ids: list[int], is_stale: bool = False) -> tuple[list[int], bool]:
        kept, stopped = append(self, request, new_token_ids, is_stale)
        counts = request.spec_decode_metrics
        if counts is None or self.spec_decode_metrics_level != "summary":
            return kept, stopped
        if not counts.__dict__.pop(_NEW, False):
            _last_step(counts)
        elif stopped:
            cut(counts, len(kept))
        if not stopped and request.sampling_params is not None and request.sampling_params.stop:
            self.__dict__.setdefault(_TOLD, {})[request.request_id] = copied(counts)
        return kept, stopped

    def updated(self: Any, *args: Any, **options: Any) -> Any:
        found = update(self, *args, **options)
        if told := self.__dict__.pop(_TOLD, None):
            for outputs in found.values():
                for output in outputs.outputs:
                    output.spec_decode_metrics = output.spec_decode_metrics or told.get(output.request_id)
        return found

    def trimmed(req_state: Any, output: Any, num_prev_tokens: int) -> None:
        trim(req_state, output, num_prev_tokens)
        if req_state.spec_decode_metrics is not None:
            cut(req_state.spec_decode_metrics, len(output.new_token_ids))

    setattr(observed, _MARK, observe)
    metrics.observe, scheduler._update_request_with_output, scheduler.update_from_output = observed, appended, updated
    processor._trim_surplus_tokens = staticmethod(trimmed)
    return True


def _any(upstream: Any) -> Any:
    return upstream


def _last_step(counts: Any, *step: int) -> None:
    """Note how many tokens the last step drafted, and how many of them were accepted; nothing where it drafted none."""
    counts.per_step_drafted, counts.per_step_accepted = [*step[:1]], [*step[1:]]


def cut(counts: Any, kept: int) -> None:
    """Of the last step `kept` tokens belong to the response: further drafts are not counted."""
    if not counts.per_step_drafted:
        return
    drafted, accepted = counts.per_step_drafted[-1], counts.per_step_accepted[-1]
    counts.num_draft_tokens -= max(0, drafted - kept)
    counts.histogram[accepted] -= 1
    counts.histogram[min(accepted, kept)] += 1
    _last_step(counts, min(drafted, kept), min(accepted, kept))


def copied(counts: Any) -> Any:
    """One that does not go on counting: where core and front end share a process they share objects."""
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    return RequestSpecDecodeMetrics(
        counts.num_spec_tokens,
        list(counts.histogram),
        counts.num_draft_tokens,
        list(counts.per_step_accepted),
        list(counts.per_step_drafted),
    )
