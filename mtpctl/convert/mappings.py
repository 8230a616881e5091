"""Types for Megatron-Bridge's interfaces, and mappings of MLPs and of drafters in the subfolder `drafter/`.

`mtpctl.convert.family_bridges` has the mappings of model families. Megatron-Bridge's classes are imported on use, after
`mtpctl.compat.megatron_bridge` has patched the import.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry

type HfNames = str | dict[str, str]
"""The Hugging Face tensor name of a parameter, or several names keyed by part (q, k, v)."""


class ParamMapping(Protocol):
    """Converts between a Megatron parameter and its Hugging Face tensors."""

    megatron_param: str
    hf_param: HfNames

    def hf_to_megatron(self, hf_weights: Tensor | Mapping[str, Tensor], megatron_module: torch.nn.Module) -> Tensor: ...

    def megatron_to_hf(self, megatron_weights: Tensor | None, megatron_module: torch.nn.Module | None) -> dict[str, Tensor]: ...

    def clear_broadcast_cache(self) -> None: ...

    def clear_tensor_spec_output_cache(self) -> None: ...


class ConversionTask(Protocol):
    """The conversion of one parameter; a frozen dataclass. Module and weight are None on ranks that do not have the parameter."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    param_name: str
    global_param_name: str
    mapping: ParamMapping
    megatron_module: torch.nn.Module | None
    param_weight: Tensor | None


class ModelBridge(Protocol):
    """The conversion of one model architecture."""

    build_conversion_tasks: Callable[..., list[ConversionTask | None]]
    mapping_registry: Callable[[], MegatronMappingRegistry]

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
    """A task whose parameter is on this rank."""

    megatron_module: torch.nn.Module
    param_weight: Tensor


def is_local(task: ConversionTask) -> TypeGuard[LocalTask]:
    """Whether the task's parameter is on this rank."""
    return task.megatron_module is not None


def hf_names(task: ConversionTask) -> tuple[str, ...]:
    """Names of the Hugging Face tensors that a parameter consists of."""
    names = task.mapping.hf_param
    return (names,) if isinstance(names, str) else tuple(names.values())


def is_packed_experts(task: ConversionTask) -> bool:
    """Whether the Hugging Face side packs all experts of a layer into one tensor."""
    return bool(getattr(task.mapping, "is_grouped_export", False))


CONVERSION = "megatron.bridge.models.conversion"
"""Megatron-Bridge's subpackage of mappings."""


def load_class(module: str, name: str) -> Any:
    """A class or function of Megatron-Bridge or transformers, which are imported on use."""
    return getattr(importlib.import_module(module), name)


def mlp_mappings(megatron_prefix: str, hf_prefix: str) -> list[object]:
    """The mappings of a gated MLP with separate gate and up projections."""
    auto_mapping, gated_mapping = (load_class(f"{CONVERSION}.param_mapping", name) for name in ("AutoMapping", "GatedMLPMapping"))
    return [
        gated_mapping(f"{megatron_prefix}.linear_fc1.weight", gate=f"{hf_prefix}.gate_proj.weight", up=f"{hf_prefix}.up_proj.weight"),
        auto_mapping(f"{megatron_prefix}.linear_fc2.weight", f"{hf_prefix}.down_proj.weight"),
    ]


def add_eagle3(bridge: ModelBridge) -> None:
    """Add the parameters of an EAGLE-3 drafter to the mappings of a bridge object."""
    megatron_prefix, hf_prefix = "mtp.layers.0", "drafter"
    layer_prefix, hf_layer = f"{megatron_prefix}.mtp_model_layer", f"{hf_prefix}.midlayer"
    name_pairs = {
        f"{megatron_prefix}.eh_proj.weight": f"{hf_prefix}.fc.weight",
        f"{megatron_prefix}.enorm.weight": f"{hf_layer}.input_layernorm.weight",
        f"{megatron_prefix}.hnorm.weight": f"{hf_layer}.hidden_norm.weight",
        f"{megatron_prefix}.final_layernorm.weight": f"{hf_prefix}.norm.weight",
    }
    _replace_mtp(bridge, name_pairs, layer_prefix, hf_layer)


def add_dflash(bridge: ModelBridge) -> None:
    """Add the parameters of a DFlash drafter to the mappings of a bridge object."""
    megatron_prefix, hf_prefix = "mtp.layers.0", "drafter"
    layer_prefix, hf_layer = f"{megatron_prefix}.mtp_model_layer.layer_*", f"{hf_prefix}.layers.*"
    name_pairs = {
        f"{megatron_prefix}.eh_proj.weight": f"{hf_prefix}.fc.weight",
        f"{megatron_prefix}.hnorm.weight": f"{hf_prefix}.hidden_norm.weight",
        f"{megatron_prefix}.final_layernorm.weight": f"{hf_prefix}.norm.weight",
        f"{layer_prefix}.input_layernorm.weight": f"{hf_layer}.input_layernorm.weight",
        f"{layer_prefix}.self_attention.q_layernorm.weight": f"{hf_layer}.self_attn.q_norm.weight",
        f"{layer_prefix}.self_attention.k_layernorm.weight": f"{hf_layer}.self_attn.k_norm.weight",
    }
    _replace_mtp(bridge, name_pairs, layer_prefix, hf_layer)


def _replace_mtp(bridge: ModelBridge, name_pairs: Mapping[str, str], layer_prefix: str, hf_layer: str) -> None:
    """Replace the MTP mappings of a bridge object by those of a drafter.

    name_pairs: the Hugging Face names of the parameters outside attention and MLP. layer_prefix, hf_layer: the prefixes of a layer in
    Megatron and in the folder.
    """
    auto_mapping, qkv_mapping = (load_class(f"{CONVERSION}.param_mapping", name) for name in ("AutoMapping", "QKVMapping"))
    attention = {part: f"{hf_layer}.self_attn.{part}_proj.weight" for part in "qkv"}
    drafter_mappings = [
        *(auto_mapping(*pair) for pair in name_pairs.items()),
        qkv_mapping(f"{layer_prefix}.self_attention.linear_qkv.weight", **attention),
        auto_mapping(f"{layer_prefix}.self_attention.linear_proj.weight", f"{hf_layer}.self_attn.o_proj.weight"),
        auto_mapping(f"{layer_prefix}.mlp.linear_fc1.layer_norm_weight", f"{hf_layer}.post_attention_layernorm.weight"),
        *mlp_mappings(f"{layer_prefix}.mlp", f"{hf_layer}.mlp"),
    ]
    upstream = bridge.mapping_registry

    def mapping_registry() -> MegatronMappingRegistry:
        registry = upstream()
        # The first match counts, and some bridges have mappings for MTP layers.
        return type(registry)(
            *drafter_mappings, *(mapping for mapping in registry.mappings if not mapping.megatron_param.startswith("mtp."))
        )

    bridge.mapping_registry = mapping_registry
