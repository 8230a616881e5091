"""Exclude drafts after the end of a response from its draft counts (vLLM 0.32.0).

vLLM counts a request's drafts when a step is verified, and later trims the step's tokens at the end of the response. Drafts after the end
are still counted, most of them as rejected. So even a perfect drafter has a few percent of rejections, and more if responses are short.
With the patch the count of the last step is trimmed in the same way as its tokens.

Stop strings are detected in the front end, which does not have the scheduler's counts. So every output of a request with stop strings
contains them. The last step's count is stored in the lists that vLLM fills for every step at its metrics level `detailed`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtpctl.rollout.vllm.patches.guard import assign, patch

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.engine.output_processor import RequestState
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

_OBSERVED = "_mtpctl_observed"
"""Attribute of a request's counts, set between counting a step and appending the step's tokens."""
_UNSENT = "_mtpctl_unsent_counts"
"""Attribute of the scheduler: counts for its next outputs, by request id."""


@patch
def install_draft_counts() -> None:
    """Trim the count of the last step, in the scheduler and in the front end."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

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
        tokens, stopped = append(self, request, new_token_ids, is_stale)
        counts = request.spec_decode_metrics
        if counts is None or self.spec_decode_metrics_level != "summary":
            return tokens, stopped
        if not counts.__dict__.pop(_OBSERVED, False):
            _set_last_step(counts)
        elif stopped:
            trim_last_step(counts, len(tokens))
        if not stopped and request.sampling_params is not None and request.sampling_params.stop:
            self.__dict__.setdefault(_UNSENT, {})[request.request_id] = snapshot(counts)
        return tokens, stopped

    def update_from_output(
        self: Scheduler, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        by_client = update(self, scheduler_output, model_runner_output)
        if unsent := self.__dict__.pop(_UNSENT, None):
            for outputs in by_client.values():
                for output in outputs.outputs:
                    output.spec_decode_metrics = output.spec_decode_metrics or unsent.get(output.request_id)
        return by_client

    def trim_surplus_tokens(req_state: RequestState, output: EngineCoreOutput, num_prev_tokens: int) -> None:
        trim(req_state, output, num_prev_tokens)
        if req_state.spec_decode_metrics is not None:
            trim_last_step(req_state.spec_decode_metrics, len(output.new_token_ids))

    assign(RequestSpecDecodeMetrics, observe=observe_last_step)
    assign(Scheduler, _update_request_with_output=update_request_with_output, update_from_output=update_from_output)
    assign(OutputProcessor, _trim_surplus_tokens=staticmethod(trim_surplus_tokens))


def _set_last_step(counts: RequestSpecDecodeMetrics, *step: int) -> None:
    """Store the last step's numbers of drafted and accepted tokens; nothing if it did not draft."""
    counts.per_step_drafted, counts.per_step_accepted = [*step[:1]], [*step[1:]]


def trim_last_step(counts: RequestSpecDecodeMetrics, length: int) -> None:
    """Exclude drafts of the last step after its first `length` tokens, which belong to the response."""
    if not counts.per_step_drafted:
        return
    drafted, accepted = counts.per_step_drafted[-1], counts.per_step_accepted[-1]
    counts.num_draft_tokens -= max(0, drafted - length)
    counts.histogram[accepted] -= 1
    counts.histogram[min(accepted, length)] += 1
    _set_last_step(counts, min(drafted, length), min(accepted, length))


def snapshot(counts: RequestSpecDecodeMetrics) -> RequestSpecDecodeMetrics:
    """An independent copy: if core and front end share a process, they share objects."""
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    return RequestSpecDecodeMetrics(
        counts.num_spec_tokens,
        list(counts.histogram),
        counts.num_draft_tokens,
        list(counts.per_step_accepted),
        list(counts.per_step_drafted),
    )
