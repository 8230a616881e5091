"""Send log-probs once, with the last output of a response, instead of with every token (vLLM 0.32.0).

vLLM's engine core sends each step's log-probs as three small arrays per request. Creating, packing and unpacking them takes longer than
everything else in the message, in the process that also launches the next step; with a few hundred requests the GPU waits for it. A
request that needs its log-probs only at its end has `DEFERRED` in its sampling settings. The core stores its log-probs, and sends them with
the last output. Before a request is aborted, `pauses.fetch_partial_outputs` fetches the stored log-probs. Tokens generated between that
call and the abort have no log-probs, and the caller drops them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches import assign, patch

if TYPE_CHECKING:
    from vllm.logprobs import FlatLogprobs
    from vllm.tokenizers import TokenizerLike
    from vllm.v1.core.sched.interface import SchedulerInterface
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus

DEFERRED = {"mtpctl_late_logprobs": True}
"""`SamplingParams.extra_args` of a request whose log-probs are read only at its end.

The request must not have stop strings, because the core does not detect them. It gets only the log-probs of sampled tokens, even if it
also requests those of the most likely ones.
"""

Columns = tuple[list[int], list[float]]
"""Tokens, and the log-prob of each."""
_IS_DEFERRED = "_mtpctl_deferred_logprobs"


class PendingLogprobs:
    """The sampled tokens of one unfinished request, with their log-probs. vLLM's token ranks are dropped, because they are not used."""

    __slots__ = ("logprobs", "tokens")

    def __init__(self) -> None:
        self.tokens, self.logprobs = array("q"), array("f")


class _RowReference(NamedTuple):
    """The rows of one request in a step's log-probs: its index in the step, and the number of positions."""

    request: int
    positions: int


class _StepLogprobs:
    """Replaces vLLM's `LogprobsLists` of a step. Its `slice_request` returns a reference to the rows of a request instead of copies."""

    __slots__ = ("_cumulative", "_logprobs", "upstream")

    def __init__(self, upstream: LogprobsLists) -> None:
        self.upstream = upstream
        self._cumulative = upstream.cu_num_generated_tokens
        self._logprobs: list[float] = upstream.logprobs[:, 0].tolist()

    def slice_request(self, req_idx: int, num_positions: int) -> _RowReference:
        return _RowReference(req_idx, num_positions)

    def rows_of(self, reference: _RowReference) -> list[float]:
        start = reference.request if self._cumulative is None else self._cumulative[reference.request]
        return self._logprobs[start : start + reference.positions]


@patch
def install_logprobs() -> None:
    """Store the log-probs of `DEFERRED` requests in the scheduler until they finish."""
    from vllm.v1.core.sched.scheduler import Scheduler

    upstream_add, upstream_finish, upstream_update = Scheduler.add_request, Scheduler.finish_requests, Scheduler.update_from_output

    def add_request(self: Scheduler, request: Request) -> None:
        if is_deferred(request):
            _pending(self)[request.request_id] = PendingLogprobs()
        upstream_add(self, request)

    def finish_requests(self: Scheduler, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        finished_requests = upstream_finish(self, request_ids, finished_status)
        for request in finished_requests:
            _pending(self).pop(request.request_id, None)
        return finished_requests

    def update_from_output(
        self: Scheduler, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        pending = _pending(self)
        if model_runner_output.logprobs is None or not pending:
            return upstream_update(self, scheduler_output, model_runner_output)
        step = _StepLogprobs(model_runner_output.logprobs)
        model_runner_output.logprobs = cast("LogprobsLists", step)
        by_client = upstream_update(self, scheduler_output, model_runner_output)
        _add_to_outputs(by_client, step, pending)
        return by_client

    assign(Scheduler, add_request=add_request, finish_requests=finish_requests, update_from_output=update_from_output)
    _install_in_front_end()


def _pending(scheduler: SchedulerInterface) -> dict[str, PendingLogprobs]:
    """The scheduler's `DEFERRED` requests, by vLLM's internal request id."""
    pending: dict[str, PendingLogprobs] = scheduler.__dict__.setdefault("mtpctl_pending_logprobs", {})
    return pending


def _install_in_front_end() -> None:
    """Make the front end append a `DEFERRED` request's log-probs in one call.

    vLLM appends them position by position, which delays 256 responses that end together by a tenth of a second.
    """
    from vllm.v1.engine.logprobs import LogprobsProcessor

    upstream_create, upstream_update = LogprobsProcessor.from_new_request, LogprobsProcessor._update_sample_logprobs

    def from_new_request(cls: type[LogprobsProcessor], tokenizer: TokenizerLike | None, request: EngineCoreRequest) -> LogprobsProcessor:
        processor = upstream_create(tokenizer, request)
        if is_deferred(request) and request.sampling_params is not None and request.sampling_params.flat_logprobs:
            setattr(processor, _IS_DEFERRED, True)
        return processor

    def _update_sample_logprobs(self: LogprobsProcessor, logprobs_lists: LogprobsLists) -> None:
        if hasattr(self, _IS_DEFERRED):
            _append_rows(self, logprobs_lists)
        else:
            upstream_update(self, logprobs_lists)

    assign(LogprobsProcessor, from_new_request=classmethod(from_new_request), _update_sample_logprobs=_update_sample_logprobs)


def is_deferred(request: Request | EngineCoreRequest) -> bool:
    """Whether the request is `DEFERRED`."""
    return request.sampling_params is not None and (request.sampling_params.extra_args or {}).keys() >= DEFERRED.keys()


def _append_rows(processor: LogprobsProcessor, rows: LogprobsLists) -> None:
    """Append the sampled tokens' log-probs to the request's, one per position."""
    flat_logprobs = cast("FlatLogprobs", processor.logprobs)
    first_index, logprobs = len(flat_logprobs.logprobs), rows.logprobs[:, 0].tolist()
    flat_logprobs.start_indices.extend(range(first_index, first_index + len(logprobs)))
    flat_logprobs.end_indices.extend(range(first_index + 1, first_index + 1 + len(logprobs)))
    flat_logprobs.token_ids += rows.logprob_token_ids[:, 0].tolist()
    flat_logprobs.logprobs += logprobs
    flat_logprobs.ranks += rows.sampled_token_ranks.tolist()
    flat_logprobs.decoded_tokens += [None] * len(logprobs)
    processor.cumulative_logprob = (processor.cumulative_logprob or 0.0) + sum(logprobs)


def _add_to_outputs(by_client: dict[int, EngineCoreOutputs], step: _StepLogprobs, pending: dict[str, PendingLogprobs]) -> None:
    """Store the rows of `DEFERRED` requests, add all stored rows to the last output, and restore vLLM's slices for other requests."""
    for outputs in by_client.values():
        for output in outputs.outputs:
            reference: object = output.new_logprobs
            if reference is None:
                continue
            if not isinstance(reference, _RowReference):
                raise UpstreamMoved(f"{__name__}: vLLM's scheduler no longer gets log-probs from slice_request")
            stored_logprobs = pending.get(output.request_id)
            if stored_logprobs is None:
                output.new_logprobs = step.upstream.slice_request(*reference)
                continue
            stored_logprobs.tokens.extend(output.new_token_ids)
            stored_logprobs.logprobs.extend(step.rows_of(reference))
            output.new_logprobs = None
            if output.finish_reason is not None:
                del pending[output.request_id]
                output.new_logprobs = to_logprobs_lists(stored_logprobs.tokens, stored_logprobs.logprobs)


def to_logprobs_lists(tokens: Sequence[int], logprobs: Sequence[float]) -> LogprobsLists:
    """Log-probs in the format of vLLM's outputs: one position per token, without ranks."""
    from vllm.v1.outputs import LogprobsLists

    ids, values = np.array(tokens, np.int64).reshape(-1, 1), np.array(logprobs, np.float32).reshape(-1, 1)
    return LogprobsLists(ids, values, np.zeros(len(tokens), np.int64), None)


def read_stored_logprobs(scheduler: SchedulerInterface, request_ids: list[str]) -> dict[str, Columns]:
    """Return the stored log-probs of these requests.

    They are not removed, because a request may finish before the abort arrives. Its last output then needs all of its log-probs.
    """
    pending = _pending(scheduler)
    return {
        request_id: (pending[request_id].tokens.tolist(), pending[request_id].logprobs.tolist())
        for request_id in request_ids
        if request_id in pending
    }


def replace_logprobs(processor: LogprobsProcessor, tokens: list[int], logprobs: list[float]) -> None:
    """Replace the log-probs in a request's `LogprobsProcessor`."""
    from vllm.logprobs import create_sample_logprobs

    processor.logprobs, processor.cumulative_logprob = create_sample_logprobs(True), 0.0
    processor._update_sample_logprobs(to_logprobs_lists(tokens, logprobs))
