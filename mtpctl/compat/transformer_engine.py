"""Import Megatron-Bridge where Transformer Engine is not installed.

Megatron-Bridge 0.6 imports `transformer_engine.pytorch` at module level in its PEFT code, and nowhere else. While it is
imported, modules of that name stand in; megatron-core is imported before them, so that it never takes them for the real
package, and they are removed again afterwards.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import sys
import types
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING

import torch

from mtpctl.compat import bridge_models

if TYPE_CHECKING:
    from megatron.bridge import AutoBridge

SUPPORTED_BRIDGE = "0.6.2"
_NAMES = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.ops")
_LINEARS = ("Linear", "LayerNormLinear", "GroupedLinear", "LayerNorm", "RMSNorm", "LayerNormMLP")


def _stand_ins() -> dict[str, types.ModuleType]:
    modules = {}
    for name in _NAMES:
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__path__ = []
        module.__dict__["__version__"] = "0.0.0"
        modules[name] = module
    pytorch, ops = modules[_NAMES[1]], modules[_NAMES[2]]
    for name in _LINEARS:
        setattr(pytorch, name, type(name, (torch.nn.Linear,), {}))
    ops.__dict__["Sequential"] = torch.nn.Sequential
    modules[_NAMES[0]].__dict__["pytorch"] = pytorch
    pytorch.__dict__["ops"] = ops
    return modules


def import_auto_bridge() -> type[AutoBridge]:
    """Megatron-Bridge's `AutoBridge`, with Transformer Engine or without.

    Raises RuntimeError on a Megatron-Bridge of another version than the one this was written for.
    """
    version = importlib.metadata.version("megatron-bridge")
    if version != SUPPORTED_BRIDGE:
        raise RuntimeError(f"megatron-bridge {version} is installed; its import without Transformer Engine is known for {SUPPORTED_BRIDGE}")
    if "megatron.bridge" in sys.modules or importlib.util.find_spec("transformer_engine") is not None:
        return importlib.import_module("megatron.bridge").AutoBridge
    importlib.import_module("megatron.core.models.gpt.gpt_model")
    bridge_models.install()
    stand_ins = _stand_ins()
    sys.modules.update(stand_ins)
    # The bridge reports every optional symbol of Transformer Engine that it misses; here all of them are missed on purpose.
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        auto_bridge: type[AutoBridge] = importlib.import_module("megatron.bridge").AutoBridge
        bridge_models.register_families()
        return auto_bridge
    finally:
        logging.disable(disabled)
        # It also turns the root logger to INFO, where megatron-core tells its whole configuration.
        logging.getLogger("megatron").setLevel(logging.ERROR)
        for name in stand_ins:
            del sys.modules[name]
