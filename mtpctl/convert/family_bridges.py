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

_LAYERS = {
    "column": ("LoraColumnParallelLinear", "PairedColumnParallelLinear", "PackedAttention"),
    "row": ("LoraRowParallelLinear",),
    "replicated": ("ReplicatedLinear", "LoraReplicatedLinear", "Router", "GatedRMSNorm"),
}
"""Class names of our layers by their tp sharding. Fused norm-and-linear layers need no entry: upstream recognizes their class names."""
_QWEN = "megatron.bridge.models.qwen"
_GLM = "megatron.bridge.models.glm"
_WRAPPED = "model.language_model."
"""Prefix of the text model inside Qwen3.5's multimodal wrappers."""


def register() -> None:
    """Register these mappings, which replace upstream's. Idempotent."""
    register_bridge = load_class(f"{CONVERSION}.model_bridge", "MegatronModelBridge").register_bridge
    auto = load_class(f"{CONVERSION}.param_mapping", "AutoMapping")
    for kind, names in _LAYERS.items():
        for name in names:
            auto.register_module_type(name, kind)
    dense, sparse = (
        load_class(f"{_QWEN}.qwen35_bridge", "Qwen35Bridge"),
        _with_mtp_experts(load_class(f"{_QWEN}.qwen35_bridge", "Qwen35MoEBridge")),
    )
    register_bridge(source="Qwen3_5MoeForCausalLM", target=GPTModel, model_type="qwen3_5_moe_text")(sparse)
    for name, model_type, text in (("Qwen3_5", "qwen3_5", dense), ("Qwen3_5Moe", "qwen3_5_moe", sparse)):
        register_bridge(source=f"{name}ForConditionalGeneration", target=GPTModel, model_type=model_type)(_of_text_model(text))
    # Registered by class, as upstream does: a registration by class takes precedence over one by name.
    for upstream, source, model_type in (
        (_with_dense_layers(load_class(f"{_QWEN}.qwen3_moe_bridge", "Qwen3MoEBridge")), "Qwen3MoeForCausalLM", "qwen3_moe"),
        (_with_dense_layers(load_class(f"{_QWEN}.qwen3_next_bridge", "Qwen3NextBridge")), "Qwen3NextForCausalLM", "qwen3_next"),
        (_with_glm_experts(load_class(f"{_GLM}.glm45_bridge", "GLM45Bridge")), "Glm4MoeForCausalLM", "glm4_moe"),
        (_ernie(load_class("megatron.bridge.models.ernie.ernie_45_bridge", "Ernie45Bridge")), "Ernie4_5_MoeForCausalLM", "ernie4_5_moe"),
        (_mimo_v2(load_class("megatron.bridge.models.mimo_v2_flash", "MiMoV2FlashBridge")), "MiMoV2FlashForCausalLM", "mimo_v2_flash"),
        (_without_copies(load_class(f"{_GLM}.glm47_flash_bridge", "GLM47FlashBridge")), "Glm4MoeLiteForCausalLM", "glm4_moe_lite"),
    ):
        register_bridge(source=load_class("transformers", source), target=GPTModel, model_type=model_type)(upstream)
    provider = load_class("megatron.bridge.models.gpt_provider", "GPTModelProvider")
    nemotron = _nemotron_h(load_class("megatron.bridge.models.nemotronh.nemotron_h_bridge", "NemotronHBridge"))
    register_bridge(source="NemotronHForCausalLM", target=GPTModel, provider=provider, model_type="nemotron_h")(nemotron)


def _extended(registry: MegatronMappingRegistry, more: list[object]) -> MegatronMappingRegistry:
    return type(registry)(*registry.mappings, *more)


def _with_mtp_experts(upstream: type) -> type:
    """Qwen3.5's bridge with separate experts in its MTP layers."""

    class Qwen35MoeBridge(upstream):  # type: ignore[misc]
        def mapping_registry(self) -> MegatronMappingRegistry:
            experts = mlp_mappings("mtp.layers.*.mtp_model_layer.mlp.experts.local_experts.*", "mtp.layers.*.mlp.experts.*")
            return _extended(super().mapping_registry(), experts)

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
            auto, ours = load_class(f"{CONVERSION}.param_mapping", "AutoMapping"), "decoder.layers.*.mlp"
            norm = auto(f"{ours}.linear_fc1.layer_norm_weight", "model.layers.*.post_attention_layernorm.weight")
            return _extended(super().mapping_registry(), [norm, *mlp_mappings(ours, "model.layers.*.mlp")])

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
                each
                for ours, theirs in prefixes.items()
                for each in mlp_mappings(f"{ours}.mlp.experts.local_experts.*", f"{theirs}.mlp.experts.*")
            ]
            return _extended(super().mapping_registry(), experts)

    return GlmBridge


def _without_copies(upstream: type) -> type:
    """GLM-4.7-Flash's bridge, changed to export no copies of embedding and head for MTP layers: `WeightBridge.export` adds them."""

    class GlmFlashBridge(upstream):  # type: ignore[misc]
        def maybe_modify_converted_hf_weight(
            self, task: ConversionTask, converted: dict[str, Tensor], state: Mapping[str, Tensor]
        ) -> dict[str, Tensor]:
            base: Any = load_class(f"{CONVERSION}.model_bridge", "MegatronModelBridge")
            tensors: dict[str, Tensor] = base.maybe_modify_converted_hf_weight(self, task, converted, state)
            return tensors

    return GlmFlashBridge


def _ernie(upstream: type) -> type:
    """ERNIE 4.5's bridge, with support for MoE layers at any interval, pairwise rotary embeddings and the MTP layer.

    ERNIE rotates dimension 2 i of a head with 2 i + 1; the trainer rotates dimension i with i + head_dim / 2. The rows of queries and keys
    are therefore reordered on loading and on export, except in the MTP layer, in which vLLM rotates halves too.
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
            ours, inner, mtp = "mtp.layers.0", "mtp.layers.0.mtp_model_layer", "model.mtp_block.0"
            pairs = {
                f"{ours}.eh_proj.weight": "model.mtp_linear_proj.0.weight",
                f"{ours}.enorm.weight": "model.mtp_emb_norm.0.weight",
                f"{ours}.hnorm.weight": "model.mtp_hidden_norm.0.weight",
                f"{inner}.self_attention.linear_qkv.layer_norm_weight": f"{mtp}.input_layernorm.weight",
                f"{inner}.self_attention.linear_proj.weight": f"{mtp}.self_attn.o_proj.weight",
                f"{inner}.mlp.linear_fc1.layer_norm_weight": f"{mtp}.post_attention_layernorm.weight",
            }
            attention = "self_attention.linear_qkv.weight"
            added: list[object] = [auto(*pair) for pair in pairs.items()]
            added += [qkv(f"{inner}.{attention}", **{part: f"{mtp}.self_attn.{part}_proj.weight" for part in "qkv"})]
            added += mlp_mappings(f"{inner}.mlp", f"{mtp}.mlp")
            width = getattr(self.hf_config, "head_dim", None) or self.hf_config.hidden_size // self.hf_config.num_attention_heads
            names = {part: f"model.layers.*.self_attn.{part}_proj.weight" for part in "qkv"}
            paired = _with_paired_rows(qkv, width)(f"decoder.layers.*.{attention}", **names)
            others = [each for each in registry.mappings if not each.megatron_param.endswith(attention)]
            return type(registry)(*others, paired, *added)

    return ErnieBridge


def _mimo_v2(upstream: type) -> type:
    """MiMo-V2-Flash's bridge, with separate expert modules, and fused QKV weights by the key-value heads of each layer."""

    class MimoV2Bridge(upstream):  # type: ignore[misc]
        def provider_bridge(self, hf_pretrained: Any) -> TransformerConfig:
            provider, config = super().provider_bridge(hf_pretrained), hf_pretrained.config
            # Upstream's are for its own modules.
            provider.rotary_base, provider.window_size = config.rope_theta, None
            provider.moe_router_score_function = "sigmoid"
            return provider

        def mapping_registry(self) -> MegatronMappingRegistry:
            registry, config = super().mapping_registry(), self.hf_config
            qkv, attention = load_class(f"{CONVERSION}.param_mapping", "QKVMapping"), "self_attention.linear_qkv.weight"
            layers = {f"decoder.layers.{i}": (f"model.layers.{i}", kind) for i, kind in enumerate(config.hybrid_layer_pattern)}
            layers |= {"mtp.layers.*.mtp_model_layer": ("model.mtp.layers.*", 1)}
            added: list[object] = []
            for ours, (theirs, is_window) in layers.items():
                groups = config.swa_num_key_value_heads if is_window else config.num_key_value_heads
                names = {part: f"{theirs}.self_attn.{part}_proj.weight" for part in "qkv"}
                added.append(
                    _grouped_rows(qkv, groups, config.num_attention_heads // groups, config.head_dim)(f"{ours}.{attention}", **names)
                )
            added += mlp_mappings("decoder.layers.*.mlp.experts.local_experts.*", "model.layers.*.mlp.experts.*")
            others = [each for each in registry.mappings if not each.megatron_param.endswith(attention)]
            return type(registry)(*others, *added)

    return MimoV2Bridge


def _nemotron_h(upstream: type) -> type:
    """Nemotron-H's bridge for layers of `GPTModel`: Mamba-2 mixers in place of attention, and attention and experts in one MTP layer."""

    class NemotronBridge(upstream):  # type: ignore[misc]
        @staticmethod
        def _hf_mtp_config(_: object) -> tuple[int, None]:
            """Leave out upstream's MTP layers, whose two layers are separate modules."""
            return 0, None

        def provider_bridge(self, hf_pretrained: Any) -> TransformerConfig:
            provider = super().provider_bridge(hf_pretrained)
            provider.moe_shared_expert_overlap = False
            provider.is_hybrid_model = False  # not upstream's model
            # Upstream prefers a stray `rms_norm_eps`.
            provider.layernorm_epsilon = hf_pretrained.config.layer_norm_epsilon
            return provider

        def mapping_registry(self) -> MegatronMappingRegistry:
            registry = super().mapping_registry()
            auto, qkv = (load_class(f"{CONVERSION}.param_mapping", name) for name in ("AutoMapping", "QKVMapping"))
            trunk: list[object] = [
                type(each)(each.megatron_param.replace(".mixer.", ".self_attention."), each.hf_param)
                if ".mixer." in each.megatron_param
                else each
                for each in registry.mappings
            ]
            ours, inner = "mtp.layers.0", "mtp.layers.0.mtp_model_layer"
            attention, experts = "mtp.layers.0", "mtp.layers.1"
            pairs = {
                **{f"{ours}.{name}.weight": f"{attention}.{name}.weight" for name in ("eh_proj", "enorm", "hnorm")},
                f"{ours}.final_layernorm.weight": f"{experts}.final_layernorm.weight",
                f"{inner}.self_attention.linear_qkv.layer_norm_weight": f"{attention}.norm.weight",
                f"{inner}.self_attention.linear_proj.weight": f"{attention}.mixer.o_proj.weight",
                f"{inner}.pre_mlp_layernorm.weight": f"{experts}.norm.weight",
                f"{inner}.mlp.router.weight": f"{experts}.mixer.gate.weight",
                f"{inner}.mlp.router.expert_bias": f"{experts}.mixer.gate.e_score_correction_bias",
            }
            for part, name in (("shared_experts", "shared_experts"), ("experts.local_experts.*", "experts.*")):
                for linear, projection in (("linear_fc1", "up_proj"), ("linear_fc2", "down_proj")):
                    pairs[f"{inner}.mlp.{part}.{linear}.weight"] = f"{experts}.mixer.{name}.{projection}.weight"
            names = {part: f"{attention}.mixer.{part}_proj.weight" for part in "qkv"}
            added = [*(auto(*pair) for pair in pairs.items()), qkv(f"{inner}.self_attention.linear_qkv.weight", **names)]
            return type(registry)(*trunk, *added)

    return NemotronBridge


def _grouped_rows(upstream: type, groups: int, queries: int, width: int) -> Any:
    """A mapping of fused QKV weights with `groups` key-value heads, each with `queries` query heads of `width`; values may have another."""

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
            parts = rows.split([queries * width, width, rows.shape[1] - (queries + 1) * width], dim=1)
            return {self.hf_param[part]: value.flatten(0, 1) for part, value in zip("qkv", parts, strict=True)}

    return GroupedQkvMapping


def _with_paired_rows(upstream: type, width: int) -> Any:
    """A mapping of fused QKV weights that reorders the rows of queries and keys in each head of `width`."""

    class PairedQkvMapping(upstream):  # type: ignore[misc]
        def hf_to_megatron(self, hf_weights: Mapping[str, Tensor], megatron_module: torch.nn.Module) -> Tensor:
            rows = {part: _halved(weight, width) if part in ("q", "k") else weight for part, weight in hf_weights.items()}
            merged: Tensor = super().hf_to_megatron(rows, megatron_module)
            return merged

        def megatron_to_hf(self, megatron_weights: Tensor | None, megatron_module: torch.nn.Module | None) -> dict[str, Tensor]:
            parts: dict[str, Tensor] = super().megatron_to_hf(megatron_weights, megatron_module)
            rotated = (self.hf_param["q"], self.hf_param["k"])
            return {name: _paired(rows, width) if name in rotated else rows for name, rows in parts.items()}

    return PairedQkvMapping


def _halved(rows: Tensor, width: int) -> Tensor:
    """Reorder the rows of each head of `width`: even rows first, then odd ones."""
    return rows.reshape(-1, width // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _paired(rows: Tensor, width: int) -> Tensor:
    """Undo `_halved`."""
    return rows.reshape(-1, 2, width // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _of_text_model(upstream: type) -> type:
    """The bridge of a multimodal wrapper, derived from that of its text model. Upstream's bridge would also build the vision tower."""
    stored_packed = load_class(f"{CONVERSION}.utils", "moe_experts_stored_packed")

    class WrapperBridge(upstream):  # type: ignore[misc]
        def provider_bridge(self, hf_pretrained: Any) -> TransformerConfig:
            text = copy(hf_pretrained.config.text_config)
            text.tie_word_embeddings = hf_pretrained.config.tie_word_embeddings
            return super().provider_bridge(SimpleNamespace(config=text))

        def _get_dense_lm_mappings(self, **options: object) -> list[ParamMapping]:
            return super()._get_dense_lm_mappings(**options, hf_prefix=_WRAPPED)

        def _get_moe_lm_mappings(self, **options: object) -> list[ParamMapping]:
            options["experts_packed"] = stored_packed(getattr(self, "hf_pretrained", None), f"{_WRAPPED}layers.")
            return super()._get_moe_lm_mappings(**options, hf_prefix=_WRAPPED)

    return WrapperBridge
