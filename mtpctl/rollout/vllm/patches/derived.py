"""Weights that vLLM derives from loaded ones, and reads in their place (vLLM 0.32.0).

Latent attention keeps a second copy of `kv_b_proj`, split and transposed. vLLM updates a derived weight only when asked to; it then
writes to the memory that the weight has already, so that captured CUDA graphs see the new values.
"""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import nn

from mtpctl.rollout.vllm.patches.version import require_pinned

DERIVED = ("W_UV", "W_UK_T")
"""Parameters that no weight update brings."""


class _LatentAttention(Protocol):
    """vLLM's attention layer of a model with latent attention."""

    def process_weights_after_loading(self, act_dtype: torch.dtype | str) -> None: ...


def refresh(model: nn.Module, dtype: torch.dtype | str) -> None:
    """Derive everything anew from the weights as they are now. `dtype` is the model's.

    Raises UpstreamMoved for another release.
    """
    require_pinned(__name__)
    for layer in model.modules():
        if hasattr(layer, DERIVED[0]) and hasattr(layer, "kv_b_proj"):
            cast(_LatentAttention, layer).process_weights_after_loading(dtype)
