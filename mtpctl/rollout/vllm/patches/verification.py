"""Fixes for the random numbers of block verification, and for draft counts at the end of a response (vLLM 0.32.0).

Draft counts: vLLM counts a request's drafts when a step is verified, and later trims the step's tokens at the end of the response. Drafts
after the end are still counted, most of them as rejected. So even a perfect drafter has a few percent of rejections, and more if responses
are short. With the patch the counts of the last step are trimmed in the same way as its tokens.

Stop strings are detected in the front end, which does not have the scheduler's counts. So the patch adds the counts to every output of a
request with stop strings. The counts of the last step are stored in lists that vLLM itself fills only at its metrics level `detailed`; the
patch supports the level `summary`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches import assign, patch

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.engine.output_processor import RequestState
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.worker.gpu.input_batch import InputBatch


_MULTIPLIER = 0x1E3779B97F4A7C15
"""2^64 divided by the golden ratio, without the top bit to fit int64. Its multiples spread positions over all bits (Fibonacci hashing)."""


@patch
def install_verification() -> None:
    """Give every step of block verification its own random numbers.

    vLLM derives the random numbers that sample and accept a draft from the request's seed and the token's position. Token-by-token
    verification examines each position once: it ends at the first rejected draft, and the next step begins after its position. Block
    verification examines all drafts before it decides how many to accept (arXiv 2403.10444, algorithm 2). The next step drafts and
    verifies the positions after the accepted prefix again, with the random numbers on which that decision depended. This biases the
    distribution of tokens: on a toy with three drafts it is off by a total variation of 0.01, and fewer drafts are accepted
    (`tests/rollout/vllm/patches/test_verification.py`).

    With the patch, the seed also depends on the position at which the step begins. Token-by-token verification is unchanged.
    """
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        return  # vLLM then uses its first model runner, which verifies token by token
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler, rejection_sampler_utils
    from vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator import MultiModuleMTPSpeculator
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

    check_random_numbers(inspect.getsource(rejection_sampler_utils))
    assign(rejection_sampler, rejection_sample=verify_with_fresh_noise(rejection_sampler_utils.rejection_sample))
    for speculator in (MultiModuleMTPSpeculator, TargetDependentARSpeculator):
        assign(speculator, propose=propose_with_fresh_noise(vars(speculator)["propose"]))


def check_random_numbers(source: str) -> None:
    """Raise UpstreamMoved unless the verification kernel in `source` draws its numbers from the seed and the position."""
    if "tl_rand32(seed, pos" not in source:
        raise UpstreamMoved(f"{__name__}: vLLM's rejection kernel draws its random numbers in another way; check whether steps share them")


def derive_step_seeds(seeds: torch.Tensor, requests: torch.Tensor, start_positions: torch.Tensor) -> torch.Tensor:
    """Return a copy of `seeds` in which the seed of each request in the batch also depends on the position at which its step begins.

    seeds [slots], int64. requests [n]: the slots of the requests. start_positions [n]: the position of each request's first row.
    """
    result = seeds.clone()
    slots = requests.long()
    result[slots] = seeds[slots] ^ ((start_positions.long() + 1) * _MULTIPLIER)
    return result


def verify_with_fresh_noise(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `rejection_sample` so that block verification uses `derive_step_seeds`."""
    signature = inspect.signature(upstream)
    _require_parameters(signature, "rejection_sample", "cu_num_logits", "pos", "idx_mapping", "seed", "use_block_verification")

    @wraps(upstream)
    def rejection_sample(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        arguments = call.arguments
        if arguments.get("use_block_verification"):
            arguments["seed"] = derive_step_seeds(
                arguments["seed"], arguments["idx_mapping"], arguments["pos"][arguments["cu_num_logits"][:-1].long()]
            )
        return upstream(*call.args, **call.kwargs)

    return rejection_sample


def propose_with_fresh_noise(upstream: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a drafter's `propose` so that drafts for block verification are sampled with `derive_step_seeds`."""
    signature = inspect.signature(upstream)
    _require_parameters(signature, "propose", "input_batch", "seeds", "dummy_run")

    @wraps(upstream)
    def propose(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.speculative_config.rejection_sample_method != "block":
            return upstream(self, *args, **kwargs)
        call = signature.bind(self, *args, **kwargs)
        arguments = call.arguments
        if not arguments.get("dummy_run"):
            batch: InputBatch = arguments["input_batch"]
            first_rows = batch.logits_indices[batch.cu_num_logits[:-1].long()]
            arguments["seeds"] = derive_step_seeds(arguments["seeds"], batch.idx_mapping, batch.positions[first_rows.long()])
        return upstream(*call.args, **call.kwargs)

    return propose


def _require_parameters(signature: inspect.Signature, function: str, *parameters: str) -> None:
    if missing_parameters := [parameter for parameter in parameters if parameter not in signature.parameters]:
        raise UpstreamMoved(
            f"{__name__}: vLLM's {function} no longer takes {', '.join(missing_parameters)}; find the new way to set its random numbers"
        )


_HAS_NEW_COUNTS = "_mtpctl_observed"
"""Attribute of a request's counts, set between counting a step and appending the step's tokens."""
_UNSENT_COUNTS = "_mtpctl_unsent_counts"
"""Attribute of the scheduler: counts for its next outputs, by request id."""


@patch
def install_draft_counts() -> None:
    """Trim the counts of the last step, in the scheduler and in the front end."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    upstream_observe, upstream_trim = RequestSpecDecodeMetrics.observe, OutputProcessor._trim_surplus_tokens
    upstream_append, upstream_update = Scheduler._update_request_with_output, Scheduler.update_from_output

    def observe_last_step(self: RequestSpecDecodeMetrics, num_draft_tokens: int, num_accepted: int, detailed: bool = False) -> None:
        upstream_observe(self, num_draft_tokens, num_accepted, detailed)
        if not detailed:
            _set_last_step(self, num_draft_tokens, num_accepted)
            setattr(self, _HAS_NEW_COUNTS, True)

    def update_request_with_output(
        self: Scheduler, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        tokens, has_stopped = upstream_append(self, request, new_token_ids, is_stale)
        counts = request.spec_decode_metrics
        if counts is None or self.spec_decode_metrics_level != "summary":
            return tokens, has_stopped
        if not counts.__dict__.pop(_HAS_NEW_COUNTS, False):
            _set_last_step(counts)
        elif has_stopped:
            trim_last_step(counts, len(tokens))
        if not has_stopped and request.sampling_params is not None and request.sampling_params.stop:
            self.__dict__.setdefault(_UNSENT_COUNTS, {})[request.request_id] = copy_counts(counts)
        return tokens, has_stopped

    def update_from_output(
        self: Scheduler, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        by_client = upstream_update(self, scheduler_output, model_runner_output)
        if unsent_counts := self.__dict__.pop(_UNSENT_COUNTS, None):
            for outputs in by_client.values():
                for output in outputs.outputs:
                    output.spec_decode_metrics = output.spec_decode_metrics or unsent_counts.get(output.request_id)
        return by_client

    def trim_surplus_tokens(req_state: RequestState, output: EngineCoreOutput, num_prev_tokens: int) -> None:
        upstream_trim(req_state, output, num_prev_tokens)
        if req_state.spec_decode_metrics is not None:
            trim_last_step(req_state.spec_decode_metrics, len(output.new_token_ids))

    assign(RequestSpecDecodeMetrics, observe=observe_last_step)
    assign(Scheduler, _update_request_with_output=update_request_with_output, update_from_output=update_from_output)
    assign(OutputProcessor, _trim_surplus_tokens=staticmethod(trim_surplus_tokens))


def _set_last_step(counts: RequestSpecDecodeMetrics, *step: int) -> None:
    """Store the last step's numbers of drafted and accepted tokens, or empty lists if it did not draft."""
    counts.per_step_drafted, counts.per_step_accepted = [*step[:1]], [*step[1:]]


def trim_last_step(counts: RequestSpecDecodeMetrics, length: int) -> None:
    """Exclude drafts of the last step that are not among its first `length` tokens: later tokens are not part of the response."""
    if not counts.per_step_drafted:
        return
    drafted, accepted = counts.per_step_drafted[-1], counts.per_step_accepted[-1]
    counts.num_draft_tokens -= max(0, drafted - length)
    counts.histogram[accepted] -= 1
    counts.histogram[min(accepted, length)] += 1
    _set_last_step(counts, min(drafted, length), min(accepted, length))


def copy_counts(counts: RequestSpecDecodeMetrics) -> RequestSpecDecodeMetrics:
    """An independent copy: if core and front end share a process, they share objects."""
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    return RequestSpecDecodeMetrics(
        counts.num_spec_tokens,
        list(counts.histogram),
        counts.num_draft_tokens,
        list(counts.per_step_accepted),
        list(counts.per_step_drafted),
    )
