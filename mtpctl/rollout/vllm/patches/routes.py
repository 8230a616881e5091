"""Routes of experts, which come with the end of their response (vLLM 0.32.0): on cards by `route_slots`, on a CPU from here.

vLLM's workers capture which experts the target's routers choose. Drafters are not captured. vLLM has this for its second model runner
alone, and CPUs have the first one, without a prefix cache: a `Recorder` does it there. vLLM's core sends each step's rows as an array a
request. As with log-probs (`logprobs`), the rows of a `DEFERRED` request are kept in the core and sent with its last output; of a request
that is aborted, `aborts.fetch_partial_outputs` fetches them. Rows that are kept must join without a gap, or the step fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches import route_slots
from mtpctl.rollout.vllm.patches.assign import assign
from mtpctl.rollout.vllm.patches.logprobs import is_deferred
from mtpctl.rollout.vllm.patches.route_slots import SlotConnector
from mtpctl.rollout.vllm.patches.version import require_pinned
from mtpctl.routes import Routes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector.connector import (
        AuxOutputConnectorMetadata,
        AuxOutputSchedulerConnector,
        AuxRequestOutput,
    )
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCapturer
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

_MARK = "_mtpctl_routes"
_RECORDER = "mtpctl_routes_recorder"
_PENDING = "mtpctl_routes_pending"
_KEPT = "mtpctl_kept_routes"


class KeptRoutes:
    """Rows of one unfinished request, in an array that grows by doubling. `first`: the position of the first row."""

    __slots__ = ("_rows", "count", "first")

    def __init__(self, first: int, rows: Routes) -> None:
        self.first, self.count = first, 0
        self._rows = np.empty((max(64, len(rows)), *rows.shape[1:]), rows.dtype)

    @property
    def rows(self) -> Routes:
        """Those that there are, as a view."""
        return self._rows[: self.count]

    def append(self, rows: Routes) -> None:
        total = self.count + len(rows)
        if total > len(self._rows):
            grown = np.empty((max(total, 2 * len(self._rows)), *rows.shape[1:]), rows.dtype)
            grown[: self.count] = self.rows
            self._rows = grown
        self._rows[self.count : total] = rows
        self.count = total


def install() -> bool:
    """Put all three in place; returns whether it was done now. May be called again.

    Raises UpstreamMoved for another release.
    """
    from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
    from vllm.platforms import current_platform

    if hasattr(AuxOutputSchedulerConnector.take_output, _MARK):
        return False
    require_pinned(__name__)
    _keep_in_core(AuxOutputSchedulerConnector)
    if current_platform.is_cpu():
        _capture_on_cpus()
    else:
        route_slots.install()
    return True


# ------------------------------------------------------------------------------------------------------------------ the core


def _keep_in_core(connector: type[AuxOutputSchedulerConnector]) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    take, finish = connector.take_output, Scheduler.finish_requests

    def take_output(self: AuxOutputSchedulerConnector, request: Request, output: dict[str, AuxRequestOutput] | None) -> Routes | None:
        rows = take(self, request, output)
        if not is_deferred(request):
            return rows
        kept = _kept(self)
        if rows is not None and len(rows):
            assert output is not None
            _join(kept, request, output[request.request_id].token_start, rows)
        if not request.is_finished():
            return None
        found = kept.pop(request.request_id, None)
        return None if found is None else found.rows

    def finish_requests(self: Scheduler, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        finished = finish(self, request_ids, finished_status)
        if self.aux_output_connector is not None:
            for request in finished:
                _kept(self.aux_output_connector).pop(request.request_id, None)
        return finished

    setattr(take_output, _MARK, True)
    assign(connector, take_output=take_output)
    assign(Scheduler, finish_requests=finish_requests)


def _kept(connector: AuxOutputSchedulerConnector) -> dict[str, KeptRoutes]:
    """The rows of the scheduler's `DEFERRED` requests, by vLLM's internal request id."""
    found: dict[str, KeptRoutes] = connector.__dict__.setdefault(_KEPT, {})
    return found


def _join(kept: dict[str, KeptRoutes], request: Request, start: int, rows: Routes) -> None:
    """Append a step's rows, which begin at position `start`; what is there stays. Raises UpstreamMoved where they would leave a gap."""
    assert request.sampling_params is not None
    mine = kept.get(request.request_id)
    if mine is None:
        mine = kept[request.request_id] = KeptRoutes(
            min(request.sampling_params.routed_experts_prompt_start, request.num_prompt_tokens), rows
        )
    due = mine.first + mine.count
    if start > due:
        raise UpstreamMoved(f"{__name__}: routes of {request.request_id} came from token {start} on where those of token {due} were due")
    mine.append(rows[due - start :])


def pending_of(scheduler: object, request_ids: list[str]) -> dict[str, tuple[bytes, str, tuple[int, ...]]]:
    """What is kept for these requests: bytes, type and sizes, which pass between processes. It stays kept, as log-probs do."""
    connector: Any = getattr(scheduler, "aux_output_connector", None)
    if connector is None:
        return {}
    if isinstance(connector, SlotConnector):
        requests = cast("Scheduler", scheduler).requests
        # What others have was sent with each output.
        asked = [requests[each] for each in request_ids if each in requests and is_deferred(requests[each])]
        found = {each.request_id: connector.pending(each) for each in asked}
    else:
        kept = _kept(connector)
        found = {each: kept[each].rows for each in request_ids if each in kept}
    return {each: (rows.tobytes(), rows.dtype.name, rows.shape) for each, rows in found.items()}


def as_rows(data: bytes, dtype: str, shape: Iterable[int]) -> Routes:
    """One answer of `pending_of` as an array."""
    return np.frombuffer(data, dtype).reshape(tuple(shape))


# --------------------------------------------------------------------------------------------------------------- the workers


class Recorder:
    """What the connector of vLLM's second model runner does, for one that has neither a prefix cache nor steps ahead of each other.

    A request's rows then come from its first token on, again after a preemption. Rows of a prompt that is read in several steps wait
    until it has been.
    """

    def __init__(self, capturer: RoutedExpertsCapturer) -> None:
        self._capturer = capturer
        self._generation = 0
        self._next: dict[str, int] = {}
        self._waiting: dict[str, list[Routes]] = {}

    def begin(self, metadata: AuxOutputConnectorMetadata | None) -> None:
        """Forget requests that have ended or were preempted, and note from which token on the rows of new ones are wanted."""
        if metadata is None:
            return
        if metadata.generation > self._generation:
            self._generation = metadata.generation
            self._next.clear()
            self._waiting.clear()
        for name in metadata.finished_requests:
            self._next.pop(name, None)
            self._waiting.pop(name, None)
        for name, start in metadata.requests.items():
            self._next.setdefault(name, start)

    def end(self, scheduled: SchedulerOutput, requests: list[str], starts: list[int], sampled: list[int]) -> dict[str, AuxRequestOutput]:
        """By request, the rows that a step completes: `starts` are first positions, `sampled` counts tokens, in the order of the batch."""
        from vllm.distributed.aux_output_connector.connector import AuxRequestOutput

        counts = [scheduled.num_scheduled_tokens[each] for each in requests]
        rows = self._capturer.snapshot_routing_data(sum(counts)).numpy()
        found, first = {}, 0
        for name, start, count, tokens in zip(requests, starts, counts, sampled, strict=True):
            rejected = len(scheduled.scheduled_spec_decode_tokens.get(name, ())) + 1 - tokens if tokens else 0
            due = self._next[name]
            if start > due:
                raise UpstreamMoved(f"{__name__}: {name} was read from token {start} on, and its routes are wanted from token {due} on")
            mine = rows[first : first + count - rejected][due - start :]
            waiting = self._waiting.setdefault(name, [])
            waiting.append(mine)
            self._next[name] = due + len(mine)
            if tokens:
                whole = np.concatenate(waiting)
                found[name] = AuxRequestOutput(self._next[name] - len(whole), whole)
                waiting.clear()
            first += count
        return found


def _capture_on_cpus() -> None:
    """Have the model runner of a CPU capture routes in each step, and give them to its output as the second model runner does."""
    from vllm.config import VllmConfig
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    verify, prepare = VllmConfig._verify_aux_output_compatibility, CPUModelRunner.initialize_kv_cache
    execute: Callable[..., Any] = CPUModelRunner.execute_model
    sample: Callable[..., Any] = CPUModelRunner.sample_tokens

    @wraps(verify)
    def verify_aux_output_compatibility(self: VllmConfig) -> None:
        # Upstream's own refuses this model runner.
        if self.aux_output_config.enabled and self.cache_config.enable_prefix_caching:
            raise ValueError("on a CPU cached prompts have no routes; set enable_prefix_caching: false")

    @wraps(prepare)
    def initialize_kv_cache(
        self: CPUModelRunner, kv_cache_config: KVCacheConfig, is_profiling: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        prepare(self, kv_cache_config, is_profiling, *args, **kwargs)
        if self.vllm_config.aux_output_config.enabled and not is_profiling:
            if self.use_async_scheduling:
                raise ValueError("on a CPU routes are told one step after another; set async_scheduling: false")
            setattr(self, _RECORDER, _recorder(self))

    @wraps(execute)
    def execute_model(self: CPUModelRunner, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        recorder: Recorder | None = getattr(self, _RECORDER, None)
        if recorder is None:
            return execute(self, scheduler_output, *args, **kwargs)
        recorder.begin(scheduler_output.aux_output_connector_metadata)
        result = execute(self, scheduler_output, *args, **kwargs)
        if self.execute_model_state is not None:
            # Sampling moves the batch on.
            requests = list(self.input_batch.req_ids)
            setattr(self, _PENDING, (scheduler_output, requests, self.input_batch.num_computed_tokens_cpu[: len(requests)].tolist()))
        return result

    @wraps(sample)
    def sample_tokens(self: CPUModelRunner, *args: Any, **kwargs: Any) -> Any:
        output = sample(self, *args, **kwargs)
        if (pending := self.__dict__.pop(_PENDING, None)) is not None:
            scheduled, requests, starts = pending
            if output.req_ids != requests:
                raise UpstreamMoved(f"{__name__}: a step's output has its requests in another order than the step")
            recorder: Recorder = getattr(self, _RECORDER)
            output.aux_output_connector_output = recorder.end(scheduled, requests, starts, list(map(len, output.sampled_token_ids)))
        return output

    assign(VllmConfig, _verify_aux_output_compatibility=verify_aux_output_compatibility)
    assign(CPUModelRunner, initialize_kv_cache=initialize_kv_cache, execute_model=execute_model, sample_tokens=sample_tokens)


def _recorder(runner: CPUModelRunner) -> Recorder:
    """A recorder of the target's routers. A drafter's layers are numbered from 0 too, or on from the target's: none of them is captured."""
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCapturer, bind_routed_experts_capturer

    capturer = RoutedExpertsCapturer(runner.vllm_config.scheduler_config.max_num_batched_tokens, runner.vllm_config)
    bind_routed_experts_capturer(runner.get_model(), capturer)
    return Recorder(capturer)
