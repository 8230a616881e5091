"""Bridges of model families with the mappings that Megatron-Bridge lacks.

The mappings are for separate expert modules, dense layers in MoE models, text models inside multimodal wrappers, and the linear layers of
`mtpctl.model`. Megatron-Bridge's classes are imported on use, after `mtpctl.compat.megatron_bridge` has patched the import.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from mtpctl.convert.mappings import CONVERSION, ConversionTask, ParamMapping, load_class, mlp_mappings

if TYPE_CHECKING:
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.core.transformer import TransformerConfig

_LAYERS_BY_SHARDING = {
    "column": ("LoraColumnParallelLinear", "PairedColumnParallelLinear", "PackedAttention"),
    "row": ("LoraRowParallelLinear",),
    "replicated": ("ReplicatedLinear", "LoraReplicatedLinear", "Router", "GatedRMSNorm"),
}
"""Class names of mtpctl's layers by their tp sharding. Fused norm-and-linear layers are not listed: upstream recognizes their names."""
_QWEN_PACKAGE = "megatron.bridge.models.qwen"
_GLM_PACKAGE = "megatron.bridge.models.glm"
_TEXT_MODEL_PREFIX = "model.language_model."
"""Prefix of the text model inside Qwen3.5's multimodal wrappers."""


def register_bridges() -> None:
    """Register the layers and bridges of this module with Megatron-Bridge, in place of upstream's bridges. Idempotent."""
    register_bridge = load_class(f"{CONVERSION}.model_bridge", "MegatronModelBridge").register_bridge
    auto_mapping = load_class(f"{CONVERSION}.param_mapping", "AutoMapping")
    for sharding, names in _LAYERS_BY_SHARDING.items():
        for name in names:
            auto_mapping.register_module_type(name, sharding)
    dense_bridge, moe_bridge = (
        load_class(f"{_QWEN_PACKAGE}.qwen35_bridge", "Qwen35Bridge"),
        _with_mtp_experts(load_class(f"{_QWEN_PACKAGE}.qwen35_bridge", "Qwen35MoEBridge")),
    )
    register_bridge(source="Qwen3_5MoeForCausalLM", target=GPTModel, model_type="qwen3_5_moe_text")(moe_bridge)
    for name, model_type, text_bridge in (("Qwen3_5", "qwen3_5", dense_bridge), ("Qwen3_5Moe", "qwen3_5_moe", moe_bridge)):
        register_bridge(source=f"{name}ForConditionalGeneration", target=GPTModel, model_type=model_type)(_make_wrapper_bridge(text_bridge))
    # Registered by class, as upstream does: a registration by class takes precedence over one by name.
    for bridge, source, model_type in (
        (_with_dense_layers(load_class(f"{_QWEN_PACKAGE}.qwen3_moe_bridge", "Qwen3MoEBridge")), "Qwen3MoeForCausalLM", "qwen3_moe"),
        (_with_dense_layers(load_class(f"{_QWEN_PACKAGE}.qwen3_next_bridge", "Qwen3NextBridge")), "Qwen3NextForCausalLM", "qwen3_next"),
        (_with_glm_experts(load_class(f"{_GLM_PACKAGE}.glm45_bridge", "GLM45Bridge")), "Glm4MoeForCausalLM", "glm4_moe"),
        (
            _ernie_bridge(load_class("megatron.bridge.models.ernie.ernie_45_bridge", "Ernie45Bridge")),
            "Ernie4_5_MoeForCausalLM",
            "ernie4_5_moe",
        ),
        (
            _mimo_v2_bridge(load_class("megatron.bridge.models.mimo_v2_flash", "MiMoV2FlashBridge")),
            "MiMoV2FlashForCausalLM",
            "mimo_v2_flash",
        ),
        (
            _without_head_copies(load_class(f"{_GLM_PACKAGE}.glm47_flash_bridge", "GLM47FlashBridge")),
            "Glm4MoeLiteForCausalLM",
            "glm4_moe_lite",
        ),
    ):
        register_bridge(source=load_class("transformers", source), target=GPTModel, model_type=model_type)(bridge)
    provider = load_class("megatron.bridge.models.gpt_provider", "GPTModelProvider")
    nemotron = _nemotron_h_bridge(load_class("megatron.bridge.models.nemotronh.nemotron_h_bridge", "NemotronHBridge"))
    register_bridge(source="NemotronHForCausalLM", target=GPTModel, provider=provider, model_type="nemotron_h")(nemotron)


def _extend_registry(registry: MegatronMappingRegistry, mappings: list[object]) -> MegatronMappingRegistry:
    return type(registry)(*registry.mappings, *mappings)


def _with_mtp_experts(upstream: type) -> type:
    """Qwen3.5's bridge with separate experts in its MTP layers."""

    class Qwen35MoeBridge(upstream):  # type: ignore[misc]
        def mapping_registry(self) -> MegatronMappingRegistry:
            experts = mlp_mappings("mtp.layers.*.mtp_model_layer.mlp.experts.local_experts.*", "mtp.layers.*.mlp.experts.*")
            return _extend_registry(super().mapping_registry(), experts)

    return Qwen35MoeBridge


def _with_dense_layers(upstream: type) -> type:
    """An MoE bridge that supports dense layers, set by `mlp_only_layers` and `decoder_sparse_step` in the config."""

    class SparseBridge(upstream):  # type: ignore[misc]
        def provider_bridge(self, hf_pretrained: Any) -> TransformerConfig:
            provider, config = super().provider_bridge(hf_pretrained), hf_pretrained.config
            dense = config.mlp_only_layers or []
            sparse = [int(i not in dense and (i + 1) % config.decoder_sparse_step == 0) for i in range(config.num_hidden_layers)]
            if not all(sparse):
                # Set only if needed: it makes checkpoints store each layer under its own name.
                provider.moe_layer_freq = sparse
            return provider

        def mapping_registry(self) -> MegatronMappingRegistry:
            auto, megatron_prefix = load_class(f"{CONVERSION}.param_mapping", "AutoMapping"), "decoder.layers.*.mlp"
            norm = auto(f"{megatron_prefix}.linear_fc1.layer_norm_weight", "model.layers.*.post_attention_layernorm.weight")
            return _extend_registry(super().mapping_registry(), [norm, *mlp_mappings(megatron_prefix, "model.layers.*.mlp")])

    return SparseBridge


def _with_glm_experts(upstream: type) -> type:
    """GLM-4.5's bridge with separate expert modules and several shared experts."""

    class GlmBridge(upstream):  # type: ignore[misc]
        def provider_bridge(self, hf_pretrained: Any) -> TransformerConfig:
            provider, config = super().provider_bridge(hf_pretrained), hf_pretrained.config
            provider.moe_shared_expert_intermediate_size = config.moe_intermediate_size * config.n_shared_experts
            return provider

        def _uses_fused_experts(self) -> bool:
            # Upstream inspects the folder's files, which a weight stream does not have. Published folders store experts separately.
            return False

        def mapping_registry(self) -> MegatronMappingRegistry:
            layers = self.hf_config.num_hidden_layers
            depths = getattr(self.hf_config, "num_nextn_predict_layers", 0) or 0
            prefixes = {"decoder.layers.*": "model.layers.*"}
            prefixes |= {f"mtp.layers.{k}.mtp_model_layer": f"model.layers.{layers + k}" for k in range(depths)}
            experts = [
                mapping
                for megatron_prefix, hf_prefix in prefixes.items()
                for mapping in mlp_mappings(f"{megatron_prefix}.mlp.experts.local_experts.*", f"{hf_prefix}.mlp.experts.*")
            ]
            return _extend_registry(super().mapping_registry(), experts)

    return GlmBridge


def _without_head_copies(upstream: type) -> type:
    """GLM-4.7-Flash's bridge without the MTP layers' copies of embedding and head on export: `WeightBridge.export` adds them."""

    class GlmFlashBridge(upstream):  # type: ignore[misc]
        def maybe_modify_converted_hf_weight(
            self, task: ConversionTask, converted: dict[str, Tensor], state: Mapping[str, Tensor]
        ) -> dict[str, Tensor]:
            base: Any = load_class(f"{CONVERSION}.model_bridge", "MegatronModelBridge")
            tensors: dict[str, Tensor] = base.maybe_modify_converted_hf_weight(self, task, converted, state)
            return tensors

    return GlmFlashBridge


def _ernie_bridge(upstream: type) -> type:
    """ERNIE 4.5's bridge, with support for MoE layers at any interval, pairwise rotary embeddings and the MTP layer.

    ERNIE rotates dimension 2 i of a head with 2 i + 1; the trainer rotates dimension i with i + head_dim / 2. The rows of queries and keys
    are therefore reordered on loading and on export. The MTP layer is an exception: vLLM rotates it like the trainer.
    """

    class ErnieBridge(upstream):  # type: ignore[misc]
        def provider_bridge(self, hf_pretrained: Any) -> TransformerConfig:
            provider, config = super().provider_bridge(hf_pretrained), hf_pretrained.config
            provider.rotary_base = config.rope_parameters["rope_theta"]
            provider.moe_shared_expert_intermediate_size = config.moe_intermediate_size * config.moe_num_shared_experts or None
            start, end, step = config.moe_layer_start_index, config.moe_layer_end_index, config.moe_layer_interval
            provider.moe_layer_freq = [int(start <= i <= end and (i + 1) % step == 0) for i in range(config.num_hidden_layers)]
            return provider

        def mapping_registry(self) -> MegatronMappingRegistry:
            registry = super().mapping_registry()
            auto, qkv = (load_class(f"{CONVERSION}.param_mapping", name) for name in ("AutoMapping", "QKVMapping"))
            megatron_prefix, layer_prefix, mtp = "mtp.layers.0", "mtp.layers.0.mtp_model_layer", "model.mtp_block.0"
            pairs = {
                f"{megatron_prefix}.eh_proj.weight": "model.mtp_linear_proj.0.weight",
                f"{megatron_prefix}.enorm.weight": "model.mtp_emb_norm.0.weight",
                f"{megatron_prefix}.hnorm.weight": "model.mtp_hidden_norm.0.weight",
                f"{layer_prefix}.self_attention.linear_qkv.layer_norm_weight": f"{mtp}.input_layernorm.weight",
                f"{layer_prefix}.self_attention.linear_proj.weight": f"{mtp}.self_attn.o_proj.weight",
                f"{layer_prefix}.mlp.linear_fc1.layer_norm_weight": f"{mtp}.post_attention_layernorm.weight",
            }
            attention = "self_attention.linear_qkv.weight"
            new_mappings: list[object] = [auto(*pair) for pair in pairs.items()]
            new_mappings += [qkv(f"{layer_prefix}.{attention}", **{part: f"{mtp}.self_attn.{part}_proj.weight" for part in "qkv"})]
            new_mappings += mlp_mappings(f"{layer_prefix}.mlp", f"{mtp}.mlp")
            head_dim = getattr(self.hf_config, "head_dim", None) or self.hf_config.hidden_size // self.hf_config.num_attention_heads
            names = {part: f"model.layers.*.self_attn.{part}_proj.weight" for part in "qkv"}
            paired = _make_paired_qkv_mapping(qkv, head_dim)(f"decoder.layers.*.{attention}", **names)
            remaining = [mapping for mapping in registry.mappings if not mapping.megatron_param.endswith(attention)]
            return type(registry)(*remaining, paired, *new_mappings)

    return ErnieBridge


def _mimo_v2_bridge(upstream: type) -> type:
    """MiMo-V2-Flash's bridge, with separate expert modules, and a QKV mapping for each layer's number of key-value heads."""

    class MimoV2Bridge(upstream):  # type: ignore[misc]
        def provider_bridge(self, hf_pretrained: Any) -> TransformerConfig:
            provider, config = super().provider_bridge(hf_pretrained), hf_pretrained.config
            # Upstream sets these for its own modules; mtpctl's read the window and the base of window layers from the shape.
            provider.rotary_base, provider.window_size = config.rope_theta, None
            provider.moe_router_score_function = "sigmoid"
            return provider

        def mapping_registry(self) -> MegatronMappingRegistry:
            registry, config = super().mapping_registry(), self.hf_config
            qkv, attention = load_class(f"{CONVERSION}.param_mapping", "QKVMapping"), "self_attention.linear_qkv.weight"
            prefixes = {f"decoder.layers.{i}": (f"model.layers.{i}", is_window) for i, is_window in enumerate(config.hybrid_layer_pattern)}
            prefixes |= {"mtp.layers.*.mtp_model_layer": ("model.mtp.layers.*", 1)}
            new_mappings: list[object] = []
            for megatron_prefix, (hf_prefix, is_window) in prefixes.items():
                groups = config.swa_num_key_value_heads if is_window else config.num_key_value_heads
                names = {part: f"{hf_prefix}.self_attn.{part}_proj.weight" for part in "qkv"}
                new_mappings.append(
                    _make_grouped_qkv_mapping(qkv, groups, config.num_attention_heads // groups, config.head_dim)(
                        f"{megatron_prefix}.{attention}", **names
                    )
                )
            new_mappings += mlp_mappings("decoder.layers.*.mlp.experts.local_experts.*", "model.layers.*.mlp.experts.*")
            remaining = [mapping for mapping in registry.mappings if not mapping.megatron_param.endswith(attention)]
            return type(registry)(*remaining, *new_mappings)

    return MimoV2Bridge


def _nemotron_h_bridge(upstream: type) -> type:
    """Nemotron-H's bridge for layers of `GPTModel`: Mamba-2 mixers in place of attention, and attention and experts in one MTP layer."""

    class NemotronBridge(upstream):  # type: ignore[misc]
        @staticmethod
        def _hf_mtp_config(_: object) -> tuple[int, None]:
            """Suppress upstream's MTP layers, in which attention and experts are separate modules."""
            return 0, None

        def provider_bridge(self, hf_pretrained: Any) -> TransformerConfig:
            provider = super().provider_bridge(hf_pretrained)
            provider.moe_shared_expert_overlap = False
            provider.is_hybrid_model = False  # the model is a `GPTModel`
            # Upstream prefers a stray `rms_norm_eps`.
            provider.layernorm_epsilon = hf_pretrained.config.layer_norm_epsilon
            return provider

        def mapping_registry(self) -> MegatronMappingRegistry:
            registry = super().mapping_registry()
            auto, qkv = (load_class(f"{CONVERSION}.param_mapping", name) for name in ("AutoMapping", "QKVMapping"))
            trunk: list[object] = [
                type(mapping)(mapping.megatron_param.replace(".mixer.", ".self_attention."), mapping.hf_param)
                if ".mixer." in mapping.megatron_param
                else mapping
                for mapping in registry.mappings
            ]
            megatron_prefix, layer_prefix = "mtp.layers.0", "mtp.layers.0.mtp_model_layer"
            attention, experts = "mtp.layers.0", "mtp.layers.1"
            pairs = {
                **{f"{megatron_prefix}.{name}.weight": f"{attention}.{name}.weight" for name in ("eh_proj", "enorm", "hnorm")},
                f"{megatron_prefix}.final_layernorm.weight": f"{experts}.final_layernorm.weight",
                f"{layer_prefix}.self_attention.linear_qkv.layer_norm_weight": f"{attention}.norm.weight",
                f"{layer_prefix}.self_attention.linear_proj.weight": f"{attention}.mixer.o_proj.weight",
                f"{layer_prefix}.pre_mlp_layernorm.weight": f"{experts}.norm.weight",
                f"{layer_prefix}.mlp.router.weight": f"{experts}.mixer.gate.weight",
                f"{layer_prefix}.mlp.router.expert_bias": f"{experts}.mixer.gate.e_score_correction_bias",
            }
            for part, name in (("shared_experts", "shared_experts"), ("experts.local_experts.*", "experts.*")):
                for linear, projection in (("linear_fc1", "up_proj"), ("linear_fc2", "down_proj")):
                    pairs[f"{layer_prefix}.mlp.{part}.{linear}.weight"] = f"{experts}.mixer.{name}.{projection}.weight"
            names = {part: f"{attention}.mixer.{part}_proj.weight" for part in "qkv"}
            new_mappings = [*(auto(*pair) for pair in pairs.items()), qkv(f"{layer_prefix}.self_attention.linear_qkv.weight", **names)]
            return type(registry)(*trunk, *new_mappings)

    return NemotronBridge


def _make_grouped_qkv_mapping(upstream: type, groups: int, queries_per_group: int, head_dim: int) -> Any:
    """A mapping of fused QKV weights with `groups` key-value heads, each with `queries_per_group` query heads of `head_dim`."""

    class GroupedQkvMapping(upstream):  # type: ignore[misc]
        def hf_to_megatron(self, hf_weights: Mapping[str, Tensor], megatron_module: torch.nn.Module) -> Tensor:
            merged = None
            if self.tp_rank == 0:
                rows = [hf_weights[part].unflatten(0, (groups, -1)) for part in "qkv"]
                merged = torch.cat(rows, dim=1).flatten(0, 1)
            result: Tensor = self._tp_mapping.hf_to_megatron(merged, megatron_module)
            return result

        def megatron_to_hf(self, megatron_weights: Tensor | None, megatron_module: torch.nn.Module | None) -> dict[str, Tensor]:
            packed = self._tp_mapping.megatron_to_hf(megatron_weights, megatron_module)
            if not packed:
                return {}
            rows = next(iter(packed.values())).unflatten(0, (groups, -1))
            parts = rows.split([queries_per_group * head_dim, head_dim, rows.shape[1] - (queries_per_group + 1) * head_dim], dim=1)
            return {self.hf_param[part]: value.flatten(0, 1) for part, value in zip("qkv", parts, strict=True)}

    return GroupedQkvMapping


def _make_paired_qkv_mapping(upstream: type, head_dim: int) -> Any:
    """A mapping of fused QKV weights that reorders the rows of queries and keys in each head of `head_dim`."""

    class PairedQkvMapping(upstream):  # type: ignore[misc]
        def hf_to_megatron(self, hf_weights: Mapping[str, Tensor], megatron_module: torch.nn.Module) -> Tensor:
            rows = {part: _split_halves(weight, head_dim) if part in ("q", "k") else weight for part, weight in hf_weights.items()}
            merged: Tensor = super().hf_to_megatron(rows, megatron_module)
            return merged

        def megatron_to_hf(self, megatron_weights: Tensor | None, megatron_module: torch.nn.Module | None) -> dict[str, Tensor]:
            parts: dict[str, Tensor] = super().megatron_to_hf(megatron_weights, megatron_module)
            rotated = (self.hf_param["q"], self.hf_param["k"])
            return {name: _interleave_halves(rows, head_dim) if name in rotated else rows for name, rows in parts.items()}

    return PairedQkvMapping


def _split_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of each head of `head_dim`: even rows first, then odd ones."""
    return rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _interleave_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Undo `_split_halves`."""
    return rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _make_wrapper_bridge(upstream: type) -> type:
    """The bridge of a multimodal wrapper, derived from that of its text model. Upstream's bridge would also build the vision tower."""
    stored_packed = load_class(f"{CONVERSION}.utils", "moe_experts_stored_packed")

    class WrapperBridge(upstream):  # type: ignore[misc]
        def provider_bridge(self, hf_pretrained: Any) -> TransformerConfig:
            text = copy(hf_pretrained.config.text_config)
            text.tie_word_embeddings = hf_pretrained.config.tie_word_embeddings
            return super().provider_bridge(SimpleNamespace(config=text))

        def _get_dense_lm_mappings(self, **options: object) -> list[ParamMapping]:
            return super()._get_dense_lm_mappings(**options, hf_prefix=_TEXT_MODEL_PREFIX)

        def _get_moe_lm_mappings(self, **options: object) -> list[ParamMapping]:
            options["experts_packed"] = stored_packed(getattr(self, "hf_pretrained", None), f"{_TEXT_MODEL_PREFIX}layers.")
            return super()._get_moe_lm_mappings(**options, hf_prefix=_TEXT_MODEL_PREFIX)

    return WrapperBridge
