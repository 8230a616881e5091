"""Drafting in vLLM (vLLM 0.32.0): steps without drafts, MTP layers by depth, and drafting times."""

from __future__ import annotations

import inspect
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial, wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.protocol import SpeculationState
from mtpctl.rollout.vllm.patches.guard import assign, patch

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig
    from vllm.model_executor.models.deepseek_mtp import DeepSeekMTP
    from vllm.model_executor.models.mimo_mtp import MiMoMTP
    from vllm.sequence import IntermediateTensors
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from mtpctl.rollout.vllm.scheduler import SwitchingScheduler

TIMED_STEPS = 256
"""Number of recent steps whose drafting times are stored, for each number of drafts."""


class Drafter(Protocol):
    """A drafter of either of vLLM's model runners."""

    speculative_config: SpeculativeConfig
    device: torch.device


class FirstDrafter(Drafter, Protocol):
    """A drafter of the first model runner."""

    num_speculative_tokens: int
    _last_draft_probs: torch.Tensor | None


class SecondDrafter(Drafter, Protocol):
    """A drafter of the second model runner; `draft_tokens` is its buffer `[requests, drafts]`."""

    draft_tokens: torch.Tensor


Propose = Callable[..., torch.Tensor]
"""A drafter's `propose`; the two model runners pass different arguments."""


# ------------------------------------------------------------------------------------------------- steps without drafts


@patch
def install_drafter() -> None:
    """Skip the drafter in steps without drafts, and time it in the others (`EngineCore.mtpctl_speculation` returns the times).

    vLLM runs its drafter even if a step requests no draft tokens, to keep the drafter's KV cache complete. With a large vocabulary this
    takes a tenth of the step, including the head, so "off" would be slower than an engine that never speculates. If the drafter is
    skipped, the tokens of the step have no entries in its cache, and drafts of running requests are accepted less often after drafting
    resumes. The output distribution is unaffected, because the target verifies.

    The first model runner, which CPUs use, also runs the rejection sampler in such a step, which takes three times as long as plain
    sampling. With the patch it uses plain sampling.
    """
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    assign(EngineCore, mtpctl_speculation=_speculation)
    _patch_propose(SpecDecodeBaseProposer, _without_drafts)
    _sample_plainly()
    if HAS_TRITON:
        from vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator import MultiModuleMTPSpeculator
        from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

        for speculator in (MultiModuleMTPSpeculator, TargetDependentARSpeculator):
            _patch_propose(speculator, _without_drafts_v2)


def _speculation(self: EngineCore, drafts: int | None, look_again: bool) -> SpeculationState:
    """`SwitchingScheduler.speculation`, with the drafting times of rank 0 since the last call."""
    state = cast("SwitchingScheduler", self.scheduler).speculation(drafts, look_again)
    times: list[dict[int, float]] = self.model_executor.collective_rpc("mtpctl_draft_s")
    return {**state, "draft_s": times[0]}


def _patch_propose(owner: type, without_drafts: Propose) -> None:
    """Make `owner.propose` call `without_drafts` in steps that request no drafts, and time all other steps."""
    upstream: Propose = vars(owner)["propose"]
    if "num_speculative_tokens" not in inspect.signature(upstream).parameters:
        raise UpstreamMoved(f"{__name__}: {owner.__name__}.propose no longer takes num_speculative_tokens; find the new way to skip it")

    def propose(self: Drafter, *args: Any, **kwargs: Any) -> torch.Tensor:
        drafts = kwargs.get("num_speculative_tokens")
        dynamic = self.speculative_config.uses_dynamic_speculative_decoding()
        if not dynamic or drafts is None or kwargs.get("dummy_run") or kwargs.get("is_profile"):
            return upstream(self, *args, **kwargs)
        if drafts == 0:
            return without_drafts(self, *args, **kwargs)
        end = TIMES.begin(drafts, self.device)
        result = upstream(self, *args, **kwargs)
        end()
        return result

    assign(owner, propose=propose)


def _sample_plainly() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    upstream = GPUModelRunner._sample
    if list(inspect.signature(upstream).parameters) != ["self", "logits", "spec_decode_metadata"]:
        raise UpstreamMoved(f"{__name__}: GPUModelRunner._sample takes other arguments; find the new way to sample without drafts")

    def sample(self: GPUModelRunner, logits: torch.Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None) -> SamplerOutput:
        no_drafts = spec_decode_metadata is not None and spec_decode_metadata.max_spec_len == 0
        return upstream(self, logits, None if no_drafts else spec_decode_metadata)

    assign(GPUModelRunner, _sample=sample)


def _without_drafts(self: FirstDrafter, *_: object, common_attn_metadata: CommonAttentionMetadata, **__: object) -> torch.Tensor:
    """No draft tokens `[requests, 0]`, in the form of the first model runner."""
    self.num_speculative_tokens = 0
    self._last_draft_probs = None
    return torch.empty(common_attn_metadata.batch_size(), 0, device=self.device, dtype=torch.int64)


def _without_drafts_v2(self: SecondDrafter, input_batch: InputBatch, *_: object, **__: object) -> torch.Tensor:
    """The second model runner's buffer of draft tokens, marked empty `[requests, limit]`."""
    return self.draft_tokens[: input_batch.num_reqs].fill_(-1)


class DraftTimes:
    """Seconds of drafting per step, by number of drafts.

    On a GPU, a pair of events in the stream around the drafter measures it, idle gaps between its kernels included. The events are read
    only in `take`, and only those that have completed, so no step waits.
    """

    def __init__(self) -> None:
        self._readers: dict[int, deque[Callable[[], float | None]]] = defaultdict(partial(deque, maxlen=TIMED_STEPS))

    def begin(self, drafts: int, device: torch.device) -> Callable[[], None]:
        """Call at the start of drafting; returns the function to call at its end."""
        if device.type == "cuda":
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()

            def end() -> None:
                last.record()
                self._readers[drafts].append(lambda: first.elapsed_time(last) / 1e3 if last.query() else None)

        else:
            began = time.perf_counter()

            def end() -> None:
                seconds = time.perf_counter() - began
                self._readers[drafts].append(lambda: seconds)

        return end

    def take(self) -> dict[int, float]:
        """Return the median by number of drafts, and reset."""
        times = {drafts: [seconds for read in readers if (seconds := read()) is not None] for drafts, readers in self._readers.items()}
        self._readers.clear()
        return {drafts: statistics.median(each) for drafts, each in times.items() if each}


TIMES = DraftTimes()
"""Times of the one drafter in this process."""


# --------------------------------------------------------------------------------------------------- MTP layers by depth


@patch
def install_depths() -> None:
    """Make drafters with several MTP layers run the layer of each depth.

    The second model runner, which GPUs use, drafts each token of a step with the layer `spec_step_idx`. Two drafters ignore it:

    - `MiMoMTP` asserts that the depth is the first, though it has the other layers.
    - `DeepSeekMTP` is compiled once, for the first depth it is called with, and without guards: the compiled code would run that depth's
      layer for all depths. The symptom is an acceptance of later drafts far below what the trainer expects.

    With the patch MiMo runs the requested layer, and DeepSeek runs later depths without the compiled code; in decoding steps they are part
    of the drafter's CUDA graph as before.
    """
    from vllm.model_executor.models.deepseek_mtp import DeepSeekMTP
    from vllm.model_executor.models.mimo_mtp import MiMoMTP

    if _takes_later_depths(MiMoMTP.forward):
        raise UpstreamMoved(f"{__name__}: MiMoMTP takes later depths by itself; remove this part of the patch")
    compiled: Callable[..., Any] | None = vars(DeepSeekMTP).get("__call__")
    if compiled is None:
        raise UpstreamMoved(f"{__name__}: DeepSeekMTP is no longer compiled as a whole; remove this part of the patch")

    def forward(
        self: MiMoMTP,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        spec_step_idx: int = 0,
    ) -> torch.Tensor:
        return self.model(input_ids, positions, hidden_states, inputs_embeds, spec_step_idx)  # type: ignore[no-any-return]

    @wraps(compiled)
    def call(self: DeepSeekMTP, *args: Any, **kwargs: Any) -> Any:
        run = self.forward if kwargs.get("spec_step_idx") else compiled.__get__(self)
        return run(*args, **kwargs)

    assign(MiMoMTP, forward=forward)
    assign(DeepSeekMTP, __call__=call)


def _takes_later_depths(forward: Callable[..., Any]) -> bool:
    """Whether the drafter's `forward` accepts the second depth (with a model that returns nothing)."""
    drafter = SimpleNamespace(model=lambda *_: None)
    try:
        forward(drafter, None, None, None, spec_step_idx=1)
    except AssertionError:
        return False
    return True
