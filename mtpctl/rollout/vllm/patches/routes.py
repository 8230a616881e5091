"""Routes of experts, on a CPU as well, and sent once with the end of their response (vLLM 0.32.0).

vLLM's workers capture which experts the target's routers choose, keep the choices of tokens whose keys and values are cached beside the
cache, by the same hashes, and leave out those of rejected drafts. Drafters are not captured. Three things are added:

- vLLM has this for its second model runner alone, which CPUs do not have. Here the first one tells vLLM's connector about its steps too.
- vLLM's core sends each step's rows as an array a request. As with log-probs (`logprobs`), the rows of a `DEFERRED` request are kept in
  the core and sent with its last output; of a request that is aborted, `aborts.fetch_partial_outputs` fetches them.
- vLLM's rows carry no positions. Those that are kept must join without a gap, or the step fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches.assign import assign
from mtpctl.rollout.vllm.patches.logprobs import is_deferred
from mtpctl.rollout.vllm.patches.version import require_pinned
from mtpctl.routes import Routes

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector, AuxRequestOutput
    from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector, PendingAuxOutput
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_MARK = "_mtpctl_routes"
_CONNECTOR = "mtpctl_routes_connector"
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


@dataclass(frozen=True, slots=True)
class _Batch:
    """What the connector reads of the second model runner's batch: requests in order, their first positions, and where their rows begin."""

    req_ids: list[str]
    num_computed_tokens_np: np.ndarray[Any, Any]
    query_start_loc_np: np.ndarray[Any, Any]


def install() -> bool:
    """Put all three in place; returns whether it was done now. May be called again.

    Raises UpstreamMoved for another release.
    """
    from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector

    if hasattr(AuxOutputSchedulerConnector.take_output, _MARK):
        return False
    require_pinned(__name__)
    _keep_in_core(AuxOutputSchedulerConnector)
    _capture_on_first_runner()
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
    connector: AuxOutputSchedulerConnector | None = getattr(scheduler, "aux_output_connector", None)
    if connector is None:
        return {}
    kept = _kept(connector)
    found = {each: kept[each].rows for each in request_ids if each in kept}
    return {each: (rows.tobytes(), rows.dtype.name, rows.shape) for each, rows in found.items()}


def as_rows(data: bytes, dtype: str, shape: Iterable[int]) -> Routes:
    """One answer of `pending_of` as an array."""
    return np.frombuffer(data, dtype).reshape(tuple(shape))


# --------------------------------------------------------------------------------------------------------------- the workers


def _capture_on_first_runner() -> None:
    """Have the first model runner tell the connector what the second one does, in the same places of a step."""
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    verify, prepare = VllmConfig._verify_aux_output_compatibility, GPUModelRunner.initialize_kv_cache
    execute: Callable[..., Any] = GPUModelRunner.execute_model
    sample: Callable[..., Any] = GPUModelRunner.sample_tokens

    def verify_aux_output_compatibility(self: VllmConfig) -> None:
        if not self.aux_output_config.enabled or self.use_v2_model_runner:
            verify(self)
        elif not self.cache_config.enable_prefix_caching:
            raise ValueError("routes of experts are kept beside cached keys and values; set enable_prefix_caching")

    def initialize_kv_cache(
        self: GPUModelRunner, kv_cache_config: KVCacheConfig, is_profiling: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        prepare(self, kv_cache_config, is_profiling, *args, **kwargs)
        if self.vllm_config.aux_output_config.enabled and not is_profiling:
            if self.use_async_scheduling:
                raise ValueError("the first model runner tells routes of experts one step after another; set async_scheduling: false")
            setattr(self, _CONNECTOR, get_aux_output_connector(_target(self), self.vllm_config, kv_cache_config))

    def execute_model(self: GPUModelRunner, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        connector: AuxOutputWorkerConnector | None = getattr(self, _CONNECTOR, None)
        if connector is None:
            return execute(self, scheduler_output, *args, **kwargs)
        connector.begin_step(scheduler_output.aux_output_connector_metadata)
        result = execute(self, scheduler_output, *args, **kwargs)
        if self.execute_model_state is not None:
            setattr(self, _PENDING, (connector.prepare_output(cast("InputBatch", _batch(self, scheduler_output))), scheduler_output))
        return result

    def sample_tokens(self: GPUModelRunner, *args: Any, **kwargs: Any) -> Any:
        output = sample(self, *args, **kwargs)
        pending, scheduled = self.__dict__.pop(_PENDING, (None, None))
        if pending is not None:
            _settle(pending, scheduled, output)
        return output

    assign(VllmConfig, _verify_aux_output_compatibility=verify_aux_output_compatibility)
    assign(GPUModelRunner, initialize_kv_cache=initialize_kv_cache, execute_model=execute_model, sample_tokens=sample_tokens)


def _target(runner: GPUModelRunner) -> nn.Module:
    """The target's modules. A drafter's layers are numbered from 0 too, or on from the target's: none of them may be captured."""
    model: nn.Module = runner.get_model()
    return model


def _batch(runner: GPUModelRunner, scheduled: SchedulerOutput) -> _Batch:
    requests = list(runner.input_batch.req_ids)
    counts = [scheduled.num_scheduled_tokens[each] for each in requests]
    starts = runner.input_batch.num_computed_tokens_cpu[: len(requests)].copy()
    return _Batch(requests, starts, np.cumsum([0, *counts]))


def _settle(pending: PendingAuxOutput, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
    """Give the step's rows to its output, without those of rejected drafts."""
    if output.req_ids != pending.request_ids:
        raise UpstreamMoved(f"{__name__}: a step's output has its requests in another order than the step")
    drafts = scheduled.scheduled_spec_decode_tokens
    sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
    drafted = np.array([len(drafts.get(each, ())) for each in pending.request_ids])
    pending.enqueue_cpu_copy(sampled, np.where(sampled > 0, drafted + 1 - sampled, 0))
    output.aux_output_connector_output = pending.process_output()
