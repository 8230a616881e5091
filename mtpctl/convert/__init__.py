"""Hugging Face folders and Megatron modules, both ways, through one mapping."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtpctl.convert.adapters import export_adapter, fingerprint, peft_config
    from mtpctl.convert.bridge import WeightBridge, names_of
    from mtpctl.convert.hf_folder import HfFolder, create_hf_folder
    from mtpctl.convert.model_weights import ModelWeights
    from mtpctl.convert.stream import StreamMap, WeightStream

__all__ = [
    "HfFolder",
    "ModelWeights",
    "StreamMap",
    "WeightBridge",
    "WeightStream",
    "create_hf_folder",
    "export_adapter",
    "fingerprint",
    "names_of",
    "peft_config",
]

_HOMES = {
    "ModelWeights": "model_weights",
    "export_adapter": "adapters",
    "fingerprint": "adapters",
    "peft_config": "adapters",
    "WeightBridge": "bridge",
    "names_of": "bridge",
    "HfFolder": "hf_folder",
    "create_hf_folder": "hf_folder",
    "StreamMap": "stream",
    "WeightStream": "stream",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
