"""What Megatron-Bridge's mapping of GLM-4.5 lacks: experts as modules of their own, and more than one shared expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from mtpctl.convert.upstream import Pretrained

if TYPE_CHECKING:
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.core.transformer import TransformerConfig


class _Config(Protocol):
    moe_intermediate_size: int
    n_shared_experts: int


def with_own_experts(
    upstream: type, registry: type[MegatronMappingRegistry], auto: Callable[..., object], gated: Callable[..., object]
) -> type:
    """Upstream's bridge with these mappings added. `auto` and `gated` are Megatron-Bridge's mappings of one and of two tensors."""

    class GlmBridge(upstream):  # type: ignore[misc]
        def provider_bridge(self, hf_pretrained: Pretrained[_Config]) -> TransformerConfig:
            provider = super().provider_bridge(hf_pretrained)
            config = hf_pretrained.config
            provider.moe_shared_expert_intermediate_size = config.moe_intermediate_size * config.n_shared_experts
            return provider

        def _uses_fused_experts(self) -> bool:
            # Upstream looks into the folder's files, which a stream of tensors does not have. Published folders name experts one by one.
            return False

        def mapping_registry(self) -> MegatronMappingRegistry:
            layers = self.hf_config.num_hidden_layers
            depths = getattr(self.hf_config, "num_nextn_predict_layers", 0) or 0
            places = {"decoder.layers.*": "model.layers.*"}
            places |= {f"mtp.layers.{k}.mtp_model_layer": f"model.layers.{layers + k}" for k in range(depths)}
            more = []
            for ours, theirs in places.items():
                expert, name = f"{ours}.mlp.experts.local_experts.*", f"{theirs}.mlp.experts.*"
                more += [
                    gated(f"{expert}.linear_fc1.weight", gate=f"{name}.gate_proj.weight", up=f"{name}.up_proj.weight"),
                    auto(f"{expert}.linear_fc2.weight", f"{name}.down_proj.weight"),
                ]
            return registry(*super().mapping_registry().mappings, *more)

    return GlmBridge
