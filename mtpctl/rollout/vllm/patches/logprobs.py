"""Log-probs that travel once, with the end of their response, and not with every token (vLLM 0.32.0).

vLLM's engine core sends each step's log-probs as three small arrays a request. Making, packing and unpacking them takes longer than
everything else in the message, in the process that also launches the next step; with some hundred requests a card waits for that.
Nobody reads them before the response ends. A request that says so in its sampling settings (`LATE`) has them kept in the core, and
gets them with its last output. One that is cut short from outside takes along through `cut.keep` what was kept when that asked:
the tokens that come between asking and the end have none, and whoever cuts it drops them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches.version import require_pinned

LATE = {"mtpctl_late_logprobs": True}
"""`SamplingParams.extra_args` of a request whose log-probs nobody reads before its end, and that ends by tokens alone: the core
knows nothing of stop strings. Of those asked for, it gets the sampled token's."""


class Kept:
    """The sampled tokens of one request so far, with their log-probs. Ranks are nobody's business, and not kept."""

    __slots__ = ("logprobs", "tokens")

    def __init__(self) -> None:
        self.tokens, self.logprobs = array("q"), array("f")


class _Slice(NamedTuple):
    """What vLLM would have cut out of a step's log-probs for one request."""

    request: int
    positions: int


class _Rows:
    """A step's log-probs that are not cut up yet."""

    __slots__ = ("_cumulative", "_logprobs", "whole")

    def __init__(self, whole: Any) -> None:
        self.whole = whole
        self._cumulative: list[int] | None = whole.cu_num_generated_tokens
        self._logprobs: list[float] = whole.logprobs[:, 0].tolist()

    def slice_request(self, req_idx: int, num_positions: int) -> _Slice:
        return _Slice(req_idx, num_positions)

    def of(self, part: _Slice) -> list[float]:
        start = part.request if self._cumulative is None else self._cumulative[part.request]
        return self._logprobs[start : start + part.positions]


def install() -> bool:
    """Have vLLM's scheduler keep what `LATE` requests allow; returns whether it was done now. May be called again.

    Raises UpstreamMoved for another release.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduler: Any = Scheduler
    if hasattr(scheduler, "mtpctl_kept"):
        return False
    require_pinned(__name__)
    scheduler.mtpctl_kept = property(lambda self: self.__dict__.setdefault("_mtpctl_kept", {}))
    add, finish, update = scheduler.add_request, scheduler.finish_requests, scheduler.update_from_output

    def add_request(self: Any, request: Any) -> None:
        if _is_late(request):
            self.mtpctl_kept[request.request_id] = Kept()
        add(self, request)

    def finish_requests(self: Any, request_ids: Any, finished_status: Any) -> Any:
        finished = finish(self, request_ids, finished_status)
        for request in finished:
            self.mtpctl_kept.pop(request.request_id, None)
        return finished

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        if model_runner_output.logprobs is None or not self.mtpctl_kept:
            return update(self, scheduler_output, model_runner_output)
        rows = _Rows(model_runner_output.logprobs)
        model_runner_output.logprobs = rows
        found = update(self, scheduler_output, model_runner_output)
        _settle(found, rows, self.mtpctl_kept)
        return found

    scheduler.add_request, scheduler.finish_requests, scheduler.update_from_output = add_request, finish_requests, update_from_output
    _install_in_front()
    return True


def _install_in_front() -> None:
    """Have the front end take a `LATE` request's log-probs as they come, in one piece: vLLM takes them position by position, which for
    256 responses that end together is a tenth of a second in which their answers wait.
    """
    from vllm.v1.engine.logprobs import LogprobsProcessor

    processor: Any = LogprobsProcessor
    processor.mtpctl_late = False
    make, update = processor.from_new_request.__func__, processor._update_sample_logprobs

    def from_new_request(cls: Any, tokenizer: Any, request: Any) -> Any:
        made = make(cls, tokenizer, request)
        made.mtpctl_late = _is_late(request) and request.sampling_params.flat_logprobs
        return made

    def _update_sample_logprobs(self: Any, rows: Any) -> None:
        if self.mtpctl_late:
            self.cumulative_logprob += _append(self.logprobs, rows)
        else:
            update(self, rows)

    processor.from_new_request, processor._update_sample_logprobs = classmethod(from_new_request), _update_sample_logprobs


def _is_late(request: Any) -> bool:
    return request.sampling_params is not None and (request.sampling_params.extra_args or {}).keys() >= LATE.keys()


def _append(flat: Any, rows: Any) -> float:
    """Put the sampled tokens' log-probs behind those there are, one a position. Returns their sum."""
    first, logprobs = len(flat.logprobs), rows.logprobs[:, 0].tolist()
    flat.start_indices.extend(range(first, first + len(logprobs)))
    flat.end_indices.extend(range(first + 1, first + 1 + len(logprobs)))
    flat.token_ids += rows.logprob_token_ids[:, 0].tolist()
    flat.logprobs += logprobs
    flat.ranks += rows.sampled_token_ranks.tolist()
    flat.decoded_tokens += [None] * len(logprobs)
    return float(sum(logprobs))


def _settle(found: dict[int, Any], rows: _Rows, kept: dict[str, Kept]) -> None:
    """Keep what may be kept, give what is whole, and cut for the others what vLLM would have cut."""
    for outputs in found.values():
        for output in outputs.outputs:
            part = output.new_logprobs
            if part is None:
                continue
            if not isinstance(part, _Slice):
                raise UpstreamMoved(f"{__name__}: vLLM's scheduler takes log-probs from a step in another way")
            mine = kept.get(output.request_id)
            if mine is None:
                output.new_logprobs = rows.whole.slice_request(*part)
                continue
            mine.tokens.extend(output.new_token_ids)
            mine.logprobs.extend(rows.of(part))
            output.new_logprobs = None
            if output.finish_reason is not None:
                del kept[output.request_id]
                output.new_logprobs = as_arrays(mine.tokens, mine.logprobs)


def as_arrays(tokens: Sequence[int], logprobs: Sequence[float]) -> Any:
    """As vLLM's front end takes them from an output: one position a token, without a rank."""
    from vllm.v1.outputs import LogprobsLists

    ids, values = np.array(tokens, np.int64).reshape(-1, 1), np.array(logprobs, np.float32).reshape(-1, 1)
    return LogprobsLists(ids, values, np.zeros(len(tokens), np.int64), None)


def so_far(scheduler: Any, request_ids: list[str]) -> dict[str, tuple[list[int], list[float]]]:
    """What is kept for these requests. It stays kept: one may end by itself before the abort reaches it, and then brings all along."""
    kept: dict[str, Kept] = scheduler.mtpctl_kept
    return {each: (kept[each].tokens.tolist(), kept[each].logprobs.tolist()) for each in request_ids if each in kept}


def put(processor: Any, tokens: list[int], logprobs: list[float]) -> None:
    """Have a request's `LogprobsProcessor` hold these, and nothing else."""
    from vllm.logprobs import create_sample_logprobs

    processor.logprobs, processor.cumulative_logprob = create_sample_logprobs(True), 0.0
    processor._update_sample_logprobs(as_arrays(tokens, logprobs))
