"""Leave drafts behind the end of a response out of its draft counts (vLLM 0.32.0).

vLLM counts a request's drafts when a step is verified, and trims the step's tokens at the end of the response afterwards. Drafts that
lie behind the end are counted all the same, most of them as rejected: a drafter that is always right shows some percent of rejections,
and the more the shorter the responses are. Here the count of the last step is trimmed with its tokens.

A stop string is found by the front end, and the scheduler's counts do not reach it. So every output of a request with stop strings
carries the counts.

The last step's count is sent in the lists that vLLM's level `detailed` keeps for every step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtpctl.rollout.vllm.patches.assign import assign
from mtpctl.rollout.vllm.patches.version import require_pinned

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.engine.output_processor import RequestState
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

_MARK = "_mtpctl_counts"
_OBSERVED = "_mtpctl_observed"
"""Set on a request's counts when a step of it was counted, until the tokens of that step are appended."""
_UNSENT = "_mtpctl_unsent_counts"
"""Attribute of the scheduler: counts that its next outputs carry, by request id."""


def install() -> bool:
    """Put the count in place; returns whether it was done now. May be called again.

    Raises UpstreamMoved for another release.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    if hasattr(RequestSpecDecodeMetrics.observe, _MARK):
        return False
    require_pinned(__name__)
    observe, append, update = RequestSpecDecodeMetrics.observe, Scheduler._update_request_with_output, Scheduler.update_from_output
    trim = OutputProcessor._trim_surplus_tokens

    def observe_last_step(self: RequestSpecDecodeMetrics, num_draft_tokens: int, num_accepted: int, detailed: bool = False) -> None:
        observe(self, num_draft_tokens, num_accepted, detailed)
        if not detailed:
            _set_last_step(self, num_draft_tokens, num_accepted)
            setattr(self, _OBSERVED, True)

    def update_request_with_output(
        self: Scheduler, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        kept, stopped = append(self, request, new_token_ids, is_stale)
        counts = request.spec_decode_metrics
        if counts is None or self.spec_decode_metrics_level != "summary":
            return kept, stopped
        if not counts.__dict__.pop(_OBSERVED, False):
            _set_last_step(counts)
        elif stopped:
            trim_last_step(counts, len(kept))
        if not stopped and request.sampling_params is not None and request.sampling_params.stop:
            self.__dict__.setdefault(_UNSENT, {})[request.request_id] = snapshot(counts)
        return kept, stopped

    def update_from_output(
        self: Scheduler, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        found = update(self, scheduler_output, model_runner_output)
        if unsent := self.__dict__.pop(_UNSENT, None):
            for outputs in found.values():
                for output in outputs.outputs:
                    output.spec_decode_metrics = output.spec_decode_metrics or unsent.get(output.request_id)
        return found

    def trim_surplus_tokens(req_state: RequestState, output: EngineCoreOutput, num_prev_tokens: int) -> None:
        trim(req_state, output, num_prev_tokens)
        if req_state.spec_decode_metrics is not None:
            trim_last_step(req_state.spec_decode_metrics, len(output.new_token_ids))

    setattr(observe_last_step, _MARK, observe)
    assign(RequestSpecDecodeMetrics, observe=observe_last_step)
    assign(Scheduler, _update_request_with_output=update_request_with_output, update_from_output=update_from_output)
    assign(OutputProcessor, _trim_surplus_tokens=staticmethod(trim_surplus_tokens))
    return True


def _set_last_step(counts: RequestSpecDecodeMetrics, *step: int) -> None:
    """Note how many tokens the last step drafted, and how many of them were accepted; no numbers where it drafted none."""
    counts.per_step_drafted, counts.per_step_accepted = [*step[:1]], [*step[1:]]


def trim_last_step(counts: RequestSpecDecodeMetrics, kept: int) -> None:
    """Count no drafts of the last step beyond its first `kept` tokens, which are those of the response."""
    if not counts.per_step_drafted:
        return
    drafted, accepted = counts.per_step_drafted[-1], counts.per_step_accepted[-1]
    counts.num_draft_tokens -= max(0, drafted - kept)
    counts.histogram[accepted] -= 1
    counts.histogram[min(accepted, kept)] += 1
    _set_last_step(counts, min(drafted, kept), min(accepted, kept))


def snapshot(counts: RequestSpecDecodeMetrics) -> RequestSpecDecodeMetrics:
    """A copy that does not go on counting: where core and front end share a process they share objects."""
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    return RequestSpecDecodeMetrics(
        counts.num_spec_tokens,
        list(counts.histogram),
        counts.num_draft_tokens,
        list(counts.per_step_accepted),
        list(counts.per_step_drafted),
    )
