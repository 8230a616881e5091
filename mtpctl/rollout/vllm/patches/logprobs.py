"""Send log-probs once, with the last output of their response, instead of with every token (vLLM 0.32.0).

vLLM's engine core sends each step's log-probs as three small arrays per request. Creating, packing and unpacking them takes longer than
everything else in the message, in the process that also launches the next step; with a few hundred requests the GPU waits for it. A
request that needs its log-probs only at its end (`DEFERRED` in its sampling settings) has them stored in the core, which sends them with
the last output. For a request that is aborted, `pauses.fetch_partial_outputs` fetches the stored ones; tokens generated between that call
and the abort have no log-probs, and the caller drops them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches.guard import assign, patch

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
"""`SamplingParams.extra_args` of a request whose log-probs are read at its end only. It must not have stop strings, because the
core does not detect them. It gets the log-probs of sampled tokens only, whatever else it requests."""

Columns = tuple[list[int], list[float]]
"""Tokens, and the log-prob of each."""
_MARK = "_mtpctl_deferred_logprobs"


class PendingLogprobs:
    """The sampled tokens of one unfinished request, with their log-probs. vLLM's ranks are dropped: nothing here reads them."""

    __slots__ = ("logprobs", "tokens")

    def __init__(self) -> None:
        self.tokens, self.logprobs = array("q"), array("f")


class _Slice(NamedTuple):
    """The rows of a step that vLLM would have copied for one request."""

    request: int
    positions: int


class _StepLogprobs:
    """Replaces vLLM's `LogprobsLists` of a step: `slice_request` only stores which rows belong to a request, and copies nothing."""

    __slots__ = ("_cumulative", "_logprobs", "whole")

    def __init__(self, whole: LogprobsLists) -> None:
        self.whole = whole
        self._cumulative = whole.cu_num_generated_tokens
        self._logprobs: list[float] = whole.logprobs[:, 0].tolist()

    def slice_request(self, req_idx: int, num_positions: int) -> _Slice:
        return _Slice(req_idx, num_positions)

    def rows_of(self, part: _Slice) -> list[float]:
        start = part.request if self._cumulative is None else self._cumulative[part.request]
        return self._logprobs[start : start + part.positions]


@patch
def install_logprobs() -> None:
    """Store the log-probs of `DEFERRED` requests in the scheduler until they finish."""
    from vllm.v1.core.sched.scheduler import Scheduler

    add, finish, update = Scheduler.add_request, Scheduler.finish_requests, Scheduler.update_from_output

    def add_request(self: Scheduler, request: Request) -> None:
        if is_deferred(request):
            _pending(self)[request.request_id] = PendingLogprobs()
        add(self, request)

    def finish_requests(self: Scheduler, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        finished = finish(self, request_ids, finished_status)
        for request in finished:
            _pending(self).pop(request.request_id, None)
        return finished

    def update_from_output(
        self: Scheduler, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        pending = _pending(self)
        if model_runner_output.logprobs is None or not pending:
            return update(self, scheduler_output, model_runner_output)
        step = _StepLogprobs(model_runner_output.logprobs)
        model_runner_output.logprobs = cast("LogprobsLists", step)
        by_client = update(self, scheduler_output, model_runner_output)
        _distribute(by_client, step, pending)
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

    make, update = LogprobsProcessor.from_new_request, LogprobsProcessor._update_sample_logprobs

    def from_new_request(cls: type[LogprobsProcessor], tokenizer: TokenizerLike | None, request: EngineCoreRequest) -> LogprobsProcessor:
        processor = make(tokenizer, request)
        if is_deferred(request) and request.sampling_params is not None and request.sampling_params.flat_logprobs:
            setattr(processor, _MARK, True)
        return processor

    def _update_sample_logprobs(self: LogprobsProcessor, logprobs_lists: LogprobsLists) -> None:
        if hasattr(self, _MARK):
            _append(self, logprobs_lists)
        else:
            update(self, logprobs_lists)

    assign(LogprobsProcessor, from_new_request=classmethod(from_new_request), _update_sample_logprobs=_update_sample_logprobs)


def is_deferred(request: Request | EngineCoreRequest) -> bool:
    """Whether the request is `DEFERRED`."""
    return request.sampling_params is not None and (request.sampling_params.extra_args or {}).keys() >= DEFERRED.keys()


def _append(processor: LogprobsProcessor, rows: LogprobsLists) -> None:
    """Append the sampled tokens' log-probs to the request's, one per position."""
    flat = cast("FlatLogprobs", processor.logprobs)
    first, logprobs = len(flat.logprobs), rows.logprobs[:, 0].tolist()
    flat.start_indices.extend(range(first, first + len(logprobs)))
    flat.end_indices.extend(range(first + 1, first + 1 + len(logprobs)))
    flat.token_ids += rows.logprob_token_ids[:, 0].tolist()
    flat.logprobs += logprobs
    flat.ranks += rows.sampled_token_ranks.tolist()
    flat.decoded_tokens += [None] * len(logprobs)
    processor.cumulative_logprob = (processor.cumulative_logprob or 0.0) + sum(logprobs)


def _distribute(by_client: dict[int, EngineCoreOutputs], step: _StepLogprobs, pending: dict[str, PendingLogprobs]) -> None:
    """Store the rows of `DEFERRED` requests, send those of finished ones, and restore vLLM's own slices for all other requests."""
    for outputs in by_client.values():
        for output in outputs.outputs:
            part: object = output.new_logprobs
            if part is None:
                continue
            if not isinstance(part, _Slice):
                raise UpstreamMoved(f"{__name__}: vLLM's scheduler takes log-probs from a step in another way")
            stored = pending.get(output.request_id)
            if stored is None:
                output.new_logprobs = step.whole.slice_request(*part)
                continue
            stored.tokens.extend(output.new_token_ids)
            stored.logprobs.extend(step.rows_of(part))
            output.new_logprobs = None
            if output.finish_reason is not None:
                del pending[output.request_id]
                output.new_logprobs = as_arrays(stored.tokens, stored.logprobs)


def as_arrays(tokens: Sequence[int], logprobs: Sequence[float]) -> LogprobsLists:
    """Log-probs in the format of vLLM's outputs: one position per token, without ranks."""
    from vllm.v1.outputs import LogprobsLists

    ids, values = np.array(tokens, np.int64).reshape(-1, 1), np.array(logprobs, np.float32).reshape(-1, 1)
    return LogprobsLists(ids, values, np.zeros(len(tokens), np.int64), None)


def pending_of(scheduler: SchedulerInterface, request_ids: list[str]) -> dict[str, Columns]:
    """The stored log-probs of these requests.

    They stay stored: a request may finish before the abort arrives, and is then sent with all of its log-probs.
    """
    pending = _pending(scheduler)
    return {each: (pending[each].tokens.tolist(), pending[each].logprobs.tolist()) for each in request_ids if each in pending}


def replace(processor: LogprobsProcessor, tokens: list[int], logprobs: list[float]) -> None:
    """Replace the log-probs in a request's `LogprobsProcessor`."""
    from vllm.logprobs import create_sample_logprobs

    processor.logprobs, processor.cumulative_logprob = create_sample_logprobs(True), 0.0
    processor._update_sample_logprobs(as_arrays(tokens, logprobs))
