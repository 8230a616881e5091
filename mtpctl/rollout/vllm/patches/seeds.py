"""Seeded requests whose prompt takes several steps, on a CPU (vLLM 0.32.0).

A step that computes a part of a request's known tokens samples one token too many, which is thrown away. vLLM then takes the
request's generator back by its offset, which CUDA's generators have and a CPU's has not: the engine dies. Long prompts come to
this, and so does a weight sync: the cleared cache is computed anew, for all requests in flight at once, and what exceeds a step's
tokens waits for the next one. Here such a row draws from the common generator in the first place, so its own need not go back.
"""

from __future__ import annotations

from typing import Any

import torch

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches.version import require_pinned

_MARK = "_mtpctl_spares_seeds"


def _has_offset() -> bool:
    """Whether a CPU's generator can be taken back as vLLM does it."""
    try:
        torch.Generator().get_offset()
    except RuntimeError:
        return False
    return True


def install() -> bool:
    """Put the mend in place where it is needed; returns whether it is. May be called again.

    Raises UpstreamMoved for another release, and where the fault is gone.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    runner: Any = CPUModelRunner
    if hasattr(runner.sample_tokens, _MARK):
        return True
    require_pinned(__name__)
    if _has_offset():
        raise UpstreamMoved(f"{__name__}: a CPU's generator has an offset now; remove the mend")
    upstream = runner.sample_tokens

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The very dictionary that the sampler reads, by row of the batch.
        batch = self.input_batch
        discarded = self.discard_request_mask.np[: batch.num_reqs]
        spared = {row: batch.generators.pop(row) for row in list(batch.generators) if discarded[row]}
        try:
            return upstream(self, *args, **kwargs)
        finally:
            batch.generators.update(spared)

    setattr(sample_tokens, _MARK, upstream)
    runner.sample_tokens = sample_tokens
    return True
