"""Fixes for sampling in vLLM's CPU backend (vLLM 0.32.0): speculative sampling without Triton, and seeded requests."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, cast

import torch

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches import assign, cpu_patch

if TYPE_CHECKING:
    from vllm.sequence import IntermediateTensors
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    SamplingOutput = ModelRunnerOutput | AsyncModelRunnerOutput | IntermediateTensors


@cpu_patch
def install_sampler() -> None:
    """Fix two faults of the fallback kernels for speculative sampling. With Triton, vLLM has neither fault, and nothing is patched.

    A. `expand_batch_to_tokens` repeats each request's temperature, top-k and top-p for its draft tokens. The CPU kernel converts its
       output buffer to int64 first, so it writes to a copy, and the caller reads uninitialized memory as temperature (vLLM issue 55005).
       Samples then follow a wrong distribution, and processed log-probs are wrong.
    B. Top-k in a step in which no request has a draft token takes the maximum of an empty tensor, and crashes the engine.
    """
    from vllm.triton_utils import HAS_TRITON
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_only

    if HAS_TRITON:
        return
    if not _loses_result(_expand_kernel_impl) or not _crashes_on_empty_batch(apply_top_k_only):
        raise UpstreamMoved(f"{__name__}: vLLM's CPU sampler no longer shows the faults patched here; remove the patch")
    upstream = rejection_sampler.apply_top_k_top_p

    def apply_top_k_top_p(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
        return upstream(logits, k, p) if logits.shape[0] else logits

    assign(rejection_sampler, expand_batch_to_tokens=expand_batch_to_tokens, apply_top_k_top_p=apply_top_k_top_p)


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat `x [requests]` to `[num_tokens]` by the cumulative counts `cu_num_tokens [requests]`.

    Values equal to `replace_from` become `replace_to`.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts, output_size=num_tokens)


def _loses_result(upstream: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, int], object]) -> bool:
    """Whether the fallback kernel leaves a float output untouched."""
    output = torch.full((3,), -1.0)
    upstream(output, torch.tensor([0.5, 2.0]), torch.tensor([1, 3], dtype=torch.int32), 0, 0)
    return bool((output == -1.0).all())


def _crashes_on_empty_batch(upstream: Callable[[torch.Tensor, torch.Tensor], object]) -> bool:
    """Whether top-k fails for logits without rows."""
    try:
        upstream(torch.empty(0, 4), torch.empty(0, dtype=torch.int32))
    except (RuntimeError, IndexError):
        return True
    return False


@cpu_patch
def install_seeds() -> None:
    """Keep the engine alive when the prompt of a seeded request takes several steps.

    A step that computes a part of a prompt samples one token too many, which vLLM discards. vLLM then rewinds the request's generator by
    its offset, which only CUDA generators have, so on a CPU the engine dies. This happens with long prompts, and after a weight sync, when
    the cleared cache is recomputed for all requests together. With the patch such a row draws from the shared generator, so the request's
    generator need not be rewound.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if _has_offset():
        raise UpstreamMoved(f"{__name__}: a CPU's generator has an offset now; remove the patch")
    # The cast is needed because torch's decorator hides the type.
    upstream = cast("Callable[[CPUModelRunner, GrammarOutput | None], SamplingOutput]", CPUModelRunner.sample_tokens)

    @wraps(upstream)
    def sample_tokens(self: CPUModelRunner, grammar_output: GrammarOutput | None) -> SamplingOutput:
        # The sampler reads this dictionary, which is keyed by row of the batch.
        batch = self.input_batch
        is_discarded = self.discard_request_mask.np[: batch.num_reqs]
        generators = {row: batch.generators.pop(row) for row in list(batch.generators) if is_discarded[row]}
        try:
            return upstream(self, grammar_output)
        finally:
            batch.generators.update(generators)

    assign(CPUModelRunner, sample_tokens=sample_tokens)


def _has_offset() -> bool:
    """Whether a CPU generator has the offset that vLLM uses to rewind it."""
    try:
        torch.Generator().get_offset()
    except RuntimeError:
        return False
    return True
