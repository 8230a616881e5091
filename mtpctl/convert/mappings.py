"""What Megatron-Bridge's mappings lack: Qwen3.5's MTP experts as modules of their own, and linear layers held whole by every rank."""

from __future__ import annotations

import importlib
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel

_CONVERSION = "megatron.bridge.models.conversion"


def _part(module: str, name: str) -> Any:
    # Imported by name, so that it happens after the stand-ins that importing Megatron-Bridge may need.
    return getattr(importlib.import_module(module), name)


def register() -> None:
    """Put these in place of upstream's. May be called again."""
    bridge = _part(f"{_CONVERSION}.model_bridge", "MegatronModelBridge")
    registry = _part(f"{_CONVERSION}.mapping_registry", "MegatronMappingRegistry")
    auto, gated = (_part(f"{_CONVERSION}.param_mapping", name) for name in ("AutoMapping", "GatedMLPMapping"))
    auto.register_module_type("ReplicatedLinear", "replicated")
    upstream = _part("megatron.bridge.models.qwen.qwen35_bridge", "Qwen35MoEBridge")

    @bridge.register_bridge(source="Qwen3_5MoeForCausalLM", target=GPTModel, model_type="qwen3_5_moe_text")
    class Qwen35MoeBridge(upstream):  # type: ignore[misc, valid-type]
        def mapping_registry(self) -> Any:
            experts = "mtp.layers.*.mtp_model_layer.mlp.experts.local_experts.*"
            names = "mtp.layers.*.mlp.experts.*"
            more = [
                gated(f"{experts}.linear_fc1.weight", gate=f"{names}.gate_proj.weight", up=f"{names}.up_proj.weight"),
                auto(f"{experts}.linear_fc2.weight", f"{names}.down_proj.weight"),
            ]
            return registry(*super().mapping_registry().mappings, *more)
