"""Mend rotary embeddings of heads that lie in a dimension of their own, on a CPU (vLLM 0.32.0).

The CPU kernel takes queries and keys as `[tokens, heads * width]`. Latent attention hands over `[tokens, heads, width]`; the kernel
then counts one head, takes the step from head to head for the one from token to token, and rotates the first rows of the memory by
the positions of others. DeepSeek's log-probs are off by 0.5 nats in the mean for that, at prompts and responses alike. Such calls go
to vLLM's own formula in PyTorch here; the result is written back, as the kernel does. On CUDA the kernel reads the dimensions.
"""

from __future__ import annotations

from typing import Any

import torch

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches.version import require_pinned

_MENDED = "_mtpctl_heads"


def _misreads_heads() -> bool:
    """Whether the kernel gives another result for the same queries where heads have a dimension of their own."""
    from vllm import _custom_ops as ops

    tokens, heads, width = 2, 2, 64
    angles = torch.arange(tokens)[:, None] * torch.ones(width // 2)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    flat, split = torch.ones(tokens, heads * width), torch.ones(tokens, heads, width)
    for query in (flat, split):
        ops.rotary_embedding(torch.arange(tokens), query, torch.ones(tokens, width), width, table, False)
    return not torch.allclose(flat, split.flatten(1))


def install() -> bool:
    """Put the mend in place on a CPU; returns whether it is. May be called again.

    Raises UpstreamMoved for another release, and where the fault is gone.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    Rotary: Any = RotaryEmbedding

    if getattr(Rotary, _MENDED, False):
        return True
    require_pinned(__name__)
    if not _misreads_heads():
        raise UpstreamMoved(f"{__name__}: vLLM's CPU kernel for rotary embeddings no longer shows the fault mended here; remove the mend")
    upstream = Rotary.forward_cpu

    def forward_cpu(self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
        if query.dim() == 2 and (key is None or key.dim() == 2):
            return upstream(self, positions, query, key)
        rotated, rotated_key = self.forward_native(positions, query, key)
        query.copy_(rotated)
        if key is not None:
            key.copy_(rotated_key)
        return query, key

    Rotary.forward_cpu = forward_cpu
    setattr(Rotary, _MENDED, True)
    return True
