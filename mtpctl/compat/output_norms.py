"""Convert the output norm of linear attention unchanged (Megatron-Bridge 0.6.2).

Qwen3-Next and Qwen3.5 store all norms around 0 except this one, which is stored around 1. Megatron-Bridge subtracts 1 on loading and adds
it on export, in the dtype of the weights: in bf16 0.05005 comes back as 0.05078. `mtpctl.model.delta_net` computes with the weight as it
is stored, so the mapping copies it.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version

PINNED = "0.6.2"
_MAPPING = "megatron.bridge.models.conversion.param_mapping"
_BRIDGES = ("megatron.bridge.models.qwen.qwen35_bridge", "megatron.bridge.models.qwen.qwen3_next_bridge")
_NAME = "RMSNorm2ZeroCenteredRMSNormMapping"


def install() -> None:
    """Make both bridges copy the norm unchanged. May be called again. Raises RuntimeError for another release."""
    if (found := version("megatron-bridge")) != PINNED:
        raise RuntimeError(f"{__name__} was written for megatron-bridge {PINNED}, found {found}: check whether it is still needed")
    plain = vars(importlib.import_module(_MAPPING))["AutoMapping"]
    for bridge in _BRIDGES:
        names = vars(importlib.import_module(bridge))
        if _NAME not in names:
            raise RuntimeError(f"{__name__}: {bridge} no longer has {_NAME}: check how it maps the norm")
        names[_NAME] = plain
