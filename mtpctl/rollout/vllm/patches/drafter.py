"""Steps without drafts that cost no drafting (vLLM 0.32.0).

Where a step asks for no draft tokens, vLLM runs its drafter all the same, to keep the drafter's KV cache whole: on a model with a
large vocabulary that is a tenth of the step, head included, so that "off" would be slower than an engine that never speculates.
Here such a step leaves the drafter out. What is generated meanwhile has no entries in the drafter's cache, so requests that span a
switch back on are drafted less well until they end. What is accepted is right all the same: the target decides. The first model runner,
which CPUs have, also draws the tokens of such a step as if drafts were to be rejected, which takes three times as long as drawing them.

The engine core also learns to answer for its scheduler and of what drafting takes, `EngineCore.mtpctl_speculation`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches.draft_times import TIMES
from mtpctl.rollout.vllm.patches.version import require_pinned


def install() -> bool:
    """Patch the drafters of both model runners, and the engine core; returns whether it was done now. May be called again.

    Raises UpstreamMoved for another release, and where a drafter takes its number of tokens in another way.
    """
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.engine.core import EngineCore

    core: Any = EngineCore
    if hasattr(core, "mtpctl_speculation"):
        return False
    require_pinned(__name__)

    def mtpctl_speculation(self: Any, drafts: int | None, look_again: bool) -> dict[str, Any]:
        times: dict[int, float] = self.model_executor.collective_rpc("mtpctl_draft_s")[0]
        return {**self.scheduler.speculation(drafts, look_again), "draft_s": times}

    core.mtpctl_speculation = mtpctl_speculation
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    _patch(SpecDecodeBaseProposer, _without_drafts)
    _draw_plainly()
    if HAS_TRITON:
        from vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator import MultiModuleMTPSpeculator
        from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

        for speculator in (MultiModuleMTPSpeculator, TargetDependentARSpeculator):
            _patch(speculator, _without_drafts_v2)
    return True


def _patch(owner: Any, instead: Any) -> None:
    upstream = owner.propose
    parameters = inspect.signature(upstream).parameters
    if "num_speculative_tokens" not in parameters:
        raise UpstreamMoved(f"{__name__}: {owner.__name__}.propose no longer takes num_speculative_tokens; find the new way to skip it")

    def propose(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = kwargs.get("num_speculative_tokens")
        chosen = self.speculative_config.uses_dynamic_speculative_decoding()
        if not chosen or drafts is None or kwargs.get("dummy_run") or kwargs.get("is_profile"):
            return upstream(self, *args, **kwargs)
        if drafts == 0:
            return instead(self, *args, **kwargs)
        end = TIMES.begin(drafts, self.device)
        result = upstream(self, *args, **kwargs)
        end()
        return result

    owner.propose = propose


def _draw_plainly() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner: Any = GPUModelRunner
    upstream = runner._sample
    if list(inspect.signature(upstream).parameters) != ["self", "logits", "spec_decode_metadata"]:
        raise UpstreamMoved(f"{__name__}: GPUModelRunner._sample takes other arguments; find the new way to draw without drafts")

    def sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        none = spec_decode_metadata is not None and spec_decode_metadata.max_spec_len == 0
        return upstream(self, logits, None if none else spec_decode_metadata)

    runner._sample = sample


def _without_drafts(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """No draft tokens `[requests, 0]`, as the first model runner takes them."""
    self.num_speculative_tokens = 0
    self._last_draft_probs = None
    metadata = kwargs["common_attn_metadata"]
    return torch.empty(metadata.batch_size(), 0, device=self.device, dtype=torch.int64)


def _without_drafts_v2(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The second model runner's buffer of draft tokens, marked empty `[requests, limit]`."""
    drafts: torch.Tensor = self.draft_tokens[: input_batch.num_reqs]
    return drafts.fill_(-1)
