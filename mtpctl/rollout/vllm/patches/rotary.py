"""Mend rotary embeddings of heads that lie in a dimension of their own, on a CPU (vLLM 0.32.0).

The CPU kernel takes queries and keys as `[tokens, heads * width]`. Latent attention passes `[tokens, heads, width]`; the kernel then
counts one head, takes the stride between heads for the stride between tokens, and rotates the first rows of the memory by the positions
of other rows. DeepSeek's log-probs are off by 0.5 nats on average because of that, on prompts and responses alike. Here such calls go to
vLLM's own formula in PyTorch, and the result is written in place, as the kernel does. On CUDA the kernel reads the dimensions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches.assign import assign
from mtpctl.rollout.vllm.patches.version import require_pinned

if TYPE_CHECKING:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

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

    Raises UpstreamMoved for another release, and where the kernel no longer has the fault.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    if getattr(RotaryEmbedding, _MENDED, False):
        return True
    require_pinned(__name__)
    if not _misreads_heads():
        raise UpstreamMoved(f"{__name__}: vLLM's CPU kernel for rotary embeddings no longer shows the fault patched here; remove the patch")
    upstream = RotaryEmbedding.forward_cpu

    def forward_cpu(
        self: RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if query.dim() == 2 and (key is None or key.dim() == 2):
            return upstream(self, positions, query, key)
        rotated, rotated_key = self.forward_native(positions, query, key)
        query.copy_(rotated)
        if key is not None and rotated_key is not None:
            key.copy_(rotated_key)
        return query, key

    assign(RotaryEmbedding, forward_cpu=forward_cpu, **{_MENDED: True})
    return True
