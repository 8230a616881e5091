"""Steps without drafts that do not run the drafter (vLLM 0.32.0).

Where a step asks for no draft tokens, vLLM runs its drafter all the same, to keep the drafter's KV cache complete: on a model with a
large vocabulary that is a tenth of the step, head included, so that "off" would be slower than an engine that never speculates.
Here such a step leaves the drafter out. The tokens of such steps have no entries in the drafter's cache, so drafts of requests that are
under way when drafting is switched on again are accepted less often, until those requests end. Accepted tokens are right all the same:
the target decides. The first model runner, which CPUs have, also samples the tokens of such a step as if drafts were to be rejected,
which takes three times as long as plain sampling; here it samples plainly.

The engine core also gets a call that reports the scheduler's state and the drafting times, `EngineCore.mtpctl_speculation`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.protocol import SpeculationState
from mtpctl.rollout.vllm.patches.assign import assign
from mtpctl.rollout.vllm.patches.draft_times import TIMES
from mtpctl.rollout.vllm.patches.version import require_pinned

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from mtpctl.rollout.vllm.scheduler import SwitchingScheduler


class Drafter(Protocol):
    """What the drafters of both model runners have."""

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
"""A drafter's `propose`; the two model runners call theirs with different arguments."""


def install() -> bool:
    """Patch the drafters of both model runners, and the engine core; returns whether it was done now. May be called again.

    Raises UpstreamMoved for another release, and where a drafter takes its number of tokens in another way.
    """
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.engine.core import EngineCore

    if hasattr(EngineCore, "mtpctl_speculation"):
        return False
    require_pinned(__name__)
    assign(EngineCore, mtpctl_speculation=_speculation)
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    _patch(SpecDecodeBaseProposer, _without_drafts)
    _draw_plainly()
    if HAS_TRITON:
        from vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator import MultiModuleMTPSpeculator
        from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

        for speculator in (MultiModuleMTPSpeculator, TargetDependentARSpeculator):
            _patch(speculator, _without_drafts_v2)
    return True


def _speculation(self: EngineCore, drafts: int | None, look_again: bool) -> SpeculationState:
    """`SwitchingScheduler.speculation`, and the drafting times of rank 0 since the last call."""
    state = cast("SwitchingScheduler", self.scheduler).speculation(drafts, look_again)
    times: list[dict[int, float]] = self.model_executor.collective_rpc("mtpctl_draft_s")
    return {**state, "draft_s": times[0]}


def _patch(owner: type, without_drafts: Propose) -> None:
    """Have `owner.propose` return what `without_drafts` does where a step asks for no drafts, and time the drafting of the others."""
    upstream: Propose = vars(owner)["propose"]
    if "num_speculative_tokens" not in inspect.signature(upstream).parameters:
        raise UpstreamMoved(f"{__name__}: {owner.__name__}.propose no longer takes num_speculative_tokens; find the new way to skip it")

    def propose(self: Drafter, *args: Any, **kwargs: Any) -> torch.Tensor:
        drafts = kwargs.get("num_speculative_tokens")
        chosen = self.speculative_config.uses_dynamic_speculative_decoding()
        if not chosen or drafts is None or kwargs.get("dummy_run") or kwargs.get("is_profile"):
            return upstream(self, *args, **kwargs)
        if drafts == 0:
            return without_drafts(self, *args, **kwargs)
        end = TIMES.begin(drafts, self.device)
        result = upstream(self, *args, **kwargs)
        end()
        return result

    assign(owner, propose=propose)


def _draw_plainly() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    upstream = GPUModelRunner._sample
    if list(inspect.signature(upstream).parameters) != ["self", "logits", "spec_decode_metadata"]:
        raise UpstreamMoved(f"{__name__}: GPUModelRunner._sample takes other arguments; find the new way to draw without drafts")

    def sample(self: GPUModelRunner, logits: torch.Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None) -> SamplerOutput:
        none = spec_decode_metadata is not None and spec_decode_metadata.max_spec_len == 0
        return upstream(self, logits, None if none else spec_decode_metadata)

    assign(GPUModelRunner, _sample=sample)


def _without_drafts(self: FirstDrafter, *_: object, common_attn_metadata: CommonAttentionMetadata, **__: object) -> torch.Tensor:
    """No draft tokens `[requests, 0]`, as the first model runner takes them."""
    self.num_speculative_tokens = 0
    self._last_draft_probs = None
    return torch.empty(common_attn_metadata.batch_size(), 0, device=self.device, dtype=torch.int64)


def _without_drafts_v2(self: SecondDrafter, input_batch: InputBatch, *_: object, **__: object) -> torch.Tensor:
    """The second model runner's buffer of draft tokens, marked empty `[requests, limit]`."""
    return self.draft_tokens[: input_batch.num_reqs].fill_(-1)
