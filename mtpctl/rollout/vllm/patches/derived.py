"""Weights that vLLM derives from loaded ones, and reads in their place (vLLM 0.32.0).

Latent attention keeps `kv_b_proj` once more, split and transposed. What is derived follows the weights only when asked to; vLLM
then writes it to the memory it has, so that captured CUDA graphs see it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

DERIVED = ("W_UV", "W_UK_T")
"""Parameters that no weight update brings."""


def refresh(model: nn.Module, dtype: Any) -> None:
    """Derive everything anew from the weights as they are now. `dtype` is the model's."""
    layer: Any
    for layer in model.modules():
        if hasattr(layer, DERIVED[0]) and hasattr(layer, "kv_b_proj"):
            layer.process_weights_after_loading(dtype)
