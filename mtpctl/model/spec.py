"""Layer specs: which module stands where in a megatron-core transformer, built from plain PyTorch modules."""

from __future__ import annotations

from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig, TransformerLayer
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayerSubmodules,
    get_mtp_num_layers_to_build,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from mtpctl.model.layers import LayerNormColumnParallelLinear, PackedAttention, RMSNorm
from mtpctl.model.mtp import MtpLayer


class PlainSpecProvider(LocalSpecProvider):
    """Answers megatron-core's question "which module for this place" with this package's modules."""

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return LayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        return RMSNorm

    def core_attention(self) -> type:
        return PackedAttention


def layer_spec(config: TransformerConfig, *, experts: int | None = None) -> ModuleSpec:
    """One decoder layer: grouped-query attention, and a dense MLP or a mixture of `experts`."""
    backend = PlainSpecProvider()
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=LayerNormColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm if experts else IdentityOp,
            mlp=get_mlp_module_spec_for_backend(backend, num_experts=experts),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def decoder_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The decoder layers of this pipeline stage."""
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer_spec(config)] * count, layer_norm=RMSNorm)


def mtp_spec(config: TransformerConfig, vp_stage: int | None = None) -> MultiTokenPredictionBlockSubmodules | None:
    """The MTP layers of this pipeline stage; None where it has none."""
    if not config.mtp_num_layers or get_mtp_num_layers_to_build(config, vp_stage=vp_stage) == 0:
        return None
    layer = ModuleSpec(
        module=MtpLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=RMSNorm, hnorm=RMSNorm, layer_norm=RMSNorm, eh_proj=ColumnParallelLinear, mtp_model_layer=layer_spec(config)
        ),
    )
    return MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * (1 if config.mtp_use_repeated_layer else config.mtp_num_layers))
