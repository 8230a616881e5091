"""Mend speculative sampling on a CPU (vLLM 0.32.0, without Triton).

Two faults of the fallback kernels, which occur only with speculation:

A. `expand_batch_to_tokens` spreads each request's temperature, top-k and top-p over its draft tokens. The CPU kernel
   behind it converts its output buffer to int64 first, and so writes into a copy: the caller reads uninitialised
   memory as temperature (vLLM issue 55005). Samples then follow a wrong distribution and processed log-probs are wrong.
B. Top-k on a step in which no request has a draft token takes the maximum of an empty tensor, and crashes the engine.

`install()` replaces the first function and guards the second one. Where Triton runs, as on CUDA, neither fault
exists and nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches.assign import assign
from mtpctl.rollout.vllm.patches.version import require_pinned


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat `x [requests]` to `[num_tokens]` by the cumulative counts `cu_num_tokens [requests]`.

    Values equal to `replace_from` become `replace_to` on the way.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts, output_size=num_tokens)


def _loses_result(upstream: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, int], object]) -> bool:
    """Whether the fallback kernel leaves a float output untouched."""
    output = torch.full((3,), -1.0)
    upstream(output, torch.tensor([0.5, 2.0]), torch.tensor([1, 3], dtype=torch.int32), 0, 0)
    return bool((output == -1.0).all())


def _crashes_without_rows(upstream: Callable[[torch.Tensor, torch.Tensor], object]) -> bool:
    """Whether top-k fails on logits without rows."""
    try:
        upstream(torch.empty(0, 4), torch.empty(0, dtype=torch.int32))
    except (RuntimeError, IndexError):
        return True
    return False


def install() -> bool:
    """Put both mends in place where they are needed; returns whether they are. May be called again.

    Raises UpstreamMoved for another release, and where a kernel no longer has its fault.
    """
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_only

    if HAS_TRITON or not current_platform.is_cpu():
        return False
    if rejection_sampler.expand_batch_to_tokens is expand_batch_to_tokens:
        return True
    require_pinned(__name__)
    if not _loses_result(_expand_kernel_impl) or not _crashes_without_rows(apply_top_k_only):
        raise UpstreamMoved(f"{__name__}: vLLM's CPU sampler no longer shows the faults patched here; remove the patch")
    upstream = rejection_sampler.apply_top_k_top_p

    def apply_top_k_top_p(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
        return upstream(logits, k, p) if logits.shape[0] else logits

    assign(rejection_sampler, expand_batch_to_tokens=expand_batch_to_tokens, apply_top_k_top_p=apply_top_k_top_p)
    return True
