"""What Megatron-Bridge's mappings lack: experts as modules of their own, text models inside wrappers, and our own linear layers."""

from __future__ import annotations

import importlib
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel

from mtpctl.convert.glm import with_own_experts
from mtpctl.convert.qwen_vl import of_the_text_model

_LAYERS = {
    "column": ("LoraColumnParallelLinear",),
    "row": ("LoraRowParallelLinear",),
    "replicated": ("ReplicatedLinear", "LoraReplicatedLinear"),
}
"""How our linear layers lie over tp, by the name of their class; a norm-and-linear layer is known by the end of its name."""
_CONVERSION = "megatron.bridge.models.conversion"


def _part(module: str, name: str) -> Any:
    # Imported by name, so that it happens after the stand-ins that importing Megatron-Bridge may need.
    return getattr(importlib.import_module(module), name)


def register() -> None:
    """Put these in place of upstream's. May be called again."""
    bridge = _part(f"{_CONVERSION}.model_bridge", "MegatronModelBridge")
    registry = _part(f"{_CONVERSION}.mapping_registry", "MegatronMappingRegistry")
    auto, gated = (_part(f"{_CONVERSION}.param_mapping", name) for name in ("AutoMapping", "GatedMLPMapping"))
    for kind, names in _LAYERS.items():
        for name in names:
            auto.register_module_type(name, kind)
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

    dense = _part("megatron.bridge.models.qwen.qwen35_bridge", "Qwen35Bridge")
    for name, model_type, text in (("Qwen3_5", "qwen3_5", dense), ("Qwen3_5Moe", "qwen3_5_moe", Qwen35MoeBridge)):
        wrapper = bridge.register_bridge(source=f"{name}ForConditionalGeneration", target=GPTModel, model_type=model_type)
        wrapper(of_the_text_model(text))

    glm = with_own_experts(_part("megatron.bridge.models.glm.glm45_bridge", "GLM45Bridge"), registry, auto, gated)
    # Upstream's is known by the class, and would be found before one known by its name.
    bridge.register_bridge(source=_part("transformers", "Glm4MoeForCausalLM"), target=GPTModel, model_type="glm4_moe")(glm)
