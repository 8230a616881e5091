"""Mappings that Megatron-Bridge lacks: experts as modules of their own, dense layers in mixtures of experts, text models inside wrappers,
and the linear layers of `model`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import Field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeGuard

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

if TYPE_CHECKING:
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.core.transformer import TransformerConfig
if TYPE_CHECKING:
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.core.transformer import TransformerConfig
if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


# Megatron-Bridge's classes, typed as far as they are called here. The classes themselves are imported by name, once the stand-ins
# that importing Megatron-Bridge may need are installed.

type HfNames = str | dict[str, str]
"""The Hugging Face tensor of a parameter, or several by their part (q, k, v)."""


class ParamMapping(Protocol):
    """How one Megatron parameter and its Hugging Face tensors are made from each other."""

    megatron_param: str
    hf_param: HfNames

    def hf_to_megatron(self, hf_weights: Tensor | Mapping[str, Tensor], megatron_module: torch.nn.Module) -> Tensor: ...

    def megatron_to_hf(self, megatron_weights: Tensor | None, megatron_module: torch.nn.Module | None) -> dict[str, Tensor]: ...

    def clear_broadcast_cache(self) -> None: ...

    def clear_tensor_spec_output_cache(self) -> None: ...


class ConversionTask(Protocol):
    """One parameter of the whole model, a frozen dataclass. Module and weight are None on ranks of other pipeline stages."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    param_name: str
    global_param_name: str
    mapping: ParamMapping
    megatron_module: torch.nn.Module | None
    param_weight: Tensor | None


class ModelBridge(Protocol):
    """The conversion of one model architecture."""

    build_conversion_tasks: Callable[..., list[ConversionTask | None]]

    def load_weights_hf_to_megatron(self, hf_pretrained: object, megatron_model: list[torch.nn.Module]) -> object: ...

    def stream_weights_megatron_to_hf(
        self, megatron_model: list[torch.nn.Module], hf_pretrained: object, **options: object
    ) -> Iterator[tuple[str, Tensor]]: ...

    def maybe_modify_loaded_hf_weight(self, hf_param: HfNames, weights: Mapping[str, Tensor]) -> Tensor | dict[str, Tensor]: ...

    def maybe_modify_converted_hf_weight(
        self, task: ConversionTask, converted: dict[str, Tensor], state: Mapping[str, Tensor]
    ) -> dict[str, Tensor]: ...

    def _broadcast_shared_embeddings(self, megatron_model: list[torch.nn.Module]) -> None: ...


class LocalTask(ConversionTask, Protocol):
    """A task whose parameter this rank holds."""

    megatron_module: torch.nn.Module
    param_weight: Tensor


class Pretrained[Config](Protocol):
    """What Megatron-Bridge takes for a Hugging Face model, as far as its config goes."""

    config: Config


def is_local(task: ConversionTask) -> TypeGuard[LocalTask]:
    """Whether this rank holds the task's parameter."""
    return task.megatron_module is not None


def names_of(task: ConversionTask) -> tuple[str, ...]:
    """Names of the Hugging Face tensors that a parameter is made of."""
    source = task.mapping.hf_param
    return (source,) if isinstance(source, str) else tuple(source.values())


def packs_experts(task: ConversionTask) -> bool:
    """Whether the mapping knows the experts of a layer only as one packed tensor."""
    return bool(getattr(task.mapping, "is_grouped_export", False))


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


# What Megatron-Bridge's mapping of GLM-4.5 lacks: experts as modules of their own, and more than one shared expert.


class _GlmConfig(Protocol):
    moe_intermediate_size: int
    n_shared_experts: int


def with_own_experts(
    upstream: type, registry: type[MegatronMappingRegistry], auto: Callable[..., object], gated: Callable[..., object]
) -> type:
    """Upstream's bridge with these mappings added. `auto` and `gated` are Megatron-Bridge's mappings of one and of two tensors."""

    class GlmBridge(upstream):  # type: ignore[misc]
        def provider_bridge(self, hf_pretrained: Pretrained[_GlmConfig]) -> TransformerConfig:
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


# The language model inside Qwen3.5's wrappers for images, as Megatron-Bridge's text bridges know it by itself.
#
# Upstream's own bridges of these wrappers build the vision tower as well; here it stays in the folder that it came in.

PREFIX = "model.language_model."


class _TextConfig(Protocol):
    tie_word_embeddings: bool


class _WrapperConfig(Protocol):
    tie_word_embeddings: bool
    text_config: _TextConfig


def of_the_text_model(upstream: type) -> type:
    """The bridge of a wrapper, derived from the bridge of its text model."""
    stored_packed = importlib.import_module("megatron.bridge.models.conversion.utils").moe_experts_stored_packed

    class WrapperBridge(upstream):  # type: ignore[misc]
        def provider_bridge(self, hf_pretrained: Pretrained[_WrapperConfig]) -> TransformerConfig:
            text = copy(hf_pretrained.config.text_config)
            text.tie_word_embeddings = hf_pretrained.config.tie_word_embeddings
            return super().provider_bridge(SimpleNamespace(config=text))

        def _get_dense_lm_mappings(self, **options: object) -> list[ParamMapping]:
            return super()._get_dense_lm_mappings(**options, hf_prefix=PREFIX)

        def _get_moe_lm_mappings(self, **options: object) -> list[ParamMapping]:
            options["experts_packed"] = stored_packed(getattr(self, "hf_pretrained", None), f"{PREFIX}layers.")
            return super()._get_moe_lm_mappings(**options, hf_prefix=PREFIX)

    return WrapperBridge
