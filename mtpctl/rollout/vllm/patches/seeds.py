"""Seeded requests whose prompt takes several steps, on a CPU (vLLM 0.32.0).

A step that computes a part of a request's known tokens samples one token too many, which vLLM discards. It then sets the request's
generator back by its offset, which CUDA's generators have and a CPU's has not: the engine dies. This happens with long prompts, and at a
weight sync: the cleared cache is computed anew, for all requests in flight at once, and tokens beyond a step's budget wait for the next
step. Here such a row draws from the common generator in the first place, so that its own need not be set back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches.assign import assign
from mtpctl.rollout.vllm.patches.version import require_pinned

if TYPE_CHECKING:
    from vllm.sequence import IntermediateTensors
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    Sampled = ModelRunnerOutput | AsyncModelRunnerOutput | IntermediateTensors

_MARK = "_mtpctl_spares_seeds"


def _has_offset() -> bool:
    """Whether a CPU's generator has the offset by which vLLM sets it back."""
    try:
        torch.Generator().get_offset()
    except RuntimeError:
        return False
    return True


def install() -> bool:
    """Put the mend in place where it is needed; returns whether it is. May be called again.

    Raises UpstreamMoved for another release, and where a CPU's generator has an offset.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if hasattr(CPUModelRunner.sample_tokens, _MARK):
        return True
    require_pinned(__name__)
    if _has_offset():
        raise UpstreamMoved(f"{__name__}: a CPU's generator has an offset now; remove the patch")
    # torch's decorator around it hides its type.
    upstream = cast("Callable[[CPUModelRunner, GrammarOutput | None], Sampled]", CPUModelRunner.sample_tokens)

    def sample_tokens(self: CPUModelRunner, grammar_output: GrammarOutput | None) -> Sampled:
        # The very dictionary that the sampler reads, by row of the batch.
        batch = self.input_batch
        discarded = self.discard_request_mask.np[: batch.num_reqs]
        spared = {row: batch.generators.pop(row) for row in list(batch.generators) if discarded[row]}
        try:
            return upstream(self, grammar_output)
        finally:
            batch.generators.update(spared)

    setattr(sample_tokens, _MARK, upstream)
    assign(CPUModelRunner, sample_tokens=sample_tokens)
    return True
