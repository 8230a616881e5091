"""Mappings that Megatron-Bridge lacks: experts as modules of their own, dense layers in mixtures of experts, text models inside wrappers,
and the linear layers of `model`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from megatron.core.models.gpt.gpt_model import GPTModel

from mtpctl.convert.glm import with_own_experts
from mtpctl.convert.qwen_vl import of_the_text_model
from mtpctl.convert.upstream import Pretrained

if TYPE_CHECKING:
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.core.transformer import TransformerConfig

_LAYERS = {
    "column": ("LoraColumnParallelLinear",),
    "row": ("LoraRowParallelLinear",),
    "replicated": ("ReplicatedLinear", "LoraReplicatedLinear", "Router", "GatedRMSNorm"),
}
"""How our linear layers lie over tp, by the name of their class; a norm-and-linear layer is known by the end of its name."""
_CONVERSION = "megatron.bridge.models.conversion"


def _part(module: str, name: str) -> Any:
    # Imported by name, so that it happens after the stand-ins that importing Megatron-Bridge may need.
    return getattr(importlib.import_module(module), name)


def register() -> None:
    """Register these in place of upstream's. It may be called more than once."""
    bridge = _part(f"{_CONVERSION}.model_bridge", "MegatronModelBridge")
    registry = _part(f"{_CONVERSION}.mapping_registry", "MegatronMappingRegistry")
    auto, gated = (_part(f"{_CONVERSION}.param_mapping", name) for name in ("AutoMapping", "GatedMLPMapping"))
    for kind, names in _LAYERS.items():
        for name in names:
            auto.register_module_type(name, kind)
    upstream = _part("megatron.bridge.models.qwen.qwen35_bridge", "Qwen35MoEBridge")

    @bridge.register_bridge(source="Qwen3_5MoeForCausalLM", target=GPTModel, model_type="qwen3_5_moe_text")
    class Qwen35MoeBridge(upstream):  # type: ignore[misc, valid-type]
        def mapping_registry(self) -> MegatronMappingRegistry:
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

    # Upstream registers its own by the class of the model, which is found before one that is registered by the class's name.
    for module, name, source, model_type in (
        ("qwen3_moe_bridge", "Qwen3MoEBridge", "Qwen3MoeForCausalLM", "qwen3_moe"),
        ("qwen3_next_bridge", "Qwen3NextBridge", "Qwen3NextForCausalLM", "qwen3_next"),
    ):
        sparse = _with_dense_layers(_part(f"megatron.bridge.models.qwen.{module}", name), registry, auto, gated)
        bridge.register_bridge(source=_part("transformers", source), target=GPTModel, model_type=model_type)(sparse)
    glm = with_own_experts(_part("megatron.bridge.models.glm.glm45_bridge", "GLM45Bridge"), registry, auto, gated)
    bridge.register_bridge(source=_part("transformers", "Glm4MoeForCausalLM"), target=GPTModel, model_type="glm4_moe")(glm)


class _SparseConfig(Protocol):
    mlp_only_layers: list[int] | None
    decoder_sparse_step: int
    num_hidden_layers: int


def _with_dense_layers(
    upstream: type, registry: type[MegatronMappingRegistry], auto: Callable[..., object], gated: Callable[..., object]
) -> type:
    """Upstream's bridge of a mixture of experts, for configs whose `mlp_only_layers` or `decoder_sparse_step` make some layers dense."""

    class SparseBridge(upstream):  # type: ignore[misc]
        def provider_bridge(self, hf_pretrained: Pretrained[_SparseConfig]) -> TransformerConfig:
            provider, config = super().provider_bridge(hf_pretrained), hf_pretrained.config
            without = config.mlp_only_layers or []
            sparse = [int(i not in without and (i + 1) % config.decoder_sparse_step == 0) for i in range(config.num_hidden_layers)]
            if not all(sparse):
                # Checkpoints then name the layers one by one, since they are not alike.
                provider.moe_layer_freq = sparse
            return provider

        def mapping_registry(self) -> MegatronMappingRegistry:
            ours, theirs = "decoder.layers.*.mlp", "model.layers.*.mlp"
            more = [
                auto(f"{ours}.linear_fc1.layer_norm_weight", "model.layers.*.post_attention_layernorm.weight"),
                gated(f"{ours}.linear_fc1.weight", gate=f"{theirs}.gate_proj.weight", up=f"{theirs}.up_proj.weight"),
                auto(f"{ours}.linear_fc2.weight", f"{theirs}.down_proj.weight"),
            ]
            return registry(*super().mapping_registry().mappings, *more)

    return SparseBridge
