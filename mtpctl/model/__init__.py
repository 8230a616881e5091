"""Megatron modules: transformer config, layer specs, packed attention, the MTP head."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtpctl.model.build import TORCH_DTYPES, build_model, complete_config
    from mtpctl.model.gpt import Hidden, MtpModel
    from mtpctl.model.lora import attach_adapters
    from mtpctl.model.packing import Packing
    from mtpctl.model.weights import draw_weights

__all__ = ["TORCH_DTYPES", "Hidden", "MtpModel", "Packing", "attach_adapters", "build_model", "complete_config", "draw_weights"]

_HOMES = {
    "TORCH_DTYPES": "build",
    "build_model": "build",
    "complete_config": "build",
    "attach_adapters": "lora",
    "draw_weights": "weights",
    "Hidden": "gpt",
    "MtpModel": "gpt",
    "Packing": "packing",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
