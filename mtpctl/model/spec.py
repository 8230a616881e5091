"""Layer specs: which module stands where in a megatron-core transformer, built from plain PyTorch modules."""

from __future__ import annotations

from functools import partial

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear as UpstreamColumnParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig, TransformerLayer
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayerSubmodules,
    get_mtp_num_layers_to_build,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import MlpBuilder, TransformerLayerSubmodules, get_transformer_layer_offset

from mtpctl.families.shape import LatentShape, LayerKind, ModelShape
from mtpctl.model.attention import SelfAttention
from mtpctl.model.delta_net import GatedDeltaNet
from mtpctl.model.experts import Experts, MixtureOfExperts, SharedExperts
from mtpctl.model.latent import LatentAttention
from mtpctl.model.layers import GatedMlp, GatedRMSNorm, LayerNormColumnParallelLinear, PackedAttention, RMSNorm
from mtpctl.model.linear import ColumnParallelLinear, RowParallelLinear
from mtpctl.model.mtp import MtpLayer
from mtpctl.model.replay import DecoderLayer
from mtpctl.model.router import Router


def layer_spec(
    config: TransformerConfig,
    shape: ModelShape,
    *,
    sparse: bool,
    kind: LayerKind = "full_attention",
    module: type[TransformerLayer] = TransformerLayer,
) -> ModuleSpec:
    """One transformer layer: grouped-query, latent or linear attention, and a dense MLP or, where `sparse`, a mixture of experts."""
    experts = sparse and shape.moe is not None
    return ModuleSpec(
        module=module,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm if shape.latent else IdentityOp,
            self_attention=_mixer(config, shape, kind),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm if experts else IdentityOp,
            mlp=_experts() if experts else _mlp(),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _mlp() -> MlpBuilder:
    linear = MLPSubmodules(linear_fc1=LayerNormColumnParallelLinear, linear_fc2=RowParallelLinear)
    return partial(GatedMlp.as_mlp_submodule, submodules=linear)


def _experts() -> MlpBuilder:
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    parts = MoESubmodules(
        router=Router, experts=partial(Experts, submodules=linear), shared_experts=partial(SharedExperts, submodules=linear)
    )
    return partial(MixtureOfExperts, submodules=parts)


def _mixer(config: TransformerConfig, shape: ModelShape, kind: LayerKind) -> ModuleSpec:
    if kind == "linear_attention":
        return _delta_net()
    return _latent_attention(shape.latent) if shape.latent else _attention(config)


def _attention(config: TransformerConfig) -> ModuleSpec:
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=LayerNormColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )


def _latent_attention(latent: LatentShape) -> ModuleSpec:
    return ModuleSpec(
        module=LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=UpstreamColumnParallelLinear,  # upstream takes no other here; `LatentAttention` has its own
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=UpstreamColumnParallelLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=RMSNorm if latent.q_rank else IdentityOp,
            kv_layernorm=RMSNorm,
        ),
    )


def _delta_net() -> ModuleSpec:
    return ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(in_proj=LayerNormColumnParallelLinear, out_norm=GatedRMSNorm, out_proj=RowParallelLinear),
    )


def decoder_spec(config: TransformerConfig, shape: ModelShape) -> TransformerBlockSubmodules:
    """The decoder layers of this pipeline stage."""
    first = get_transformer_layer_offset(config)
    dense = shape.moe.dense_layers if shape.moe else frozenset(range(shape.layers))
    here = range(first, first + get_num_layers_to_build(config))
    specs = [layer_spec(config, shape, sparse=layer not in dense, kind=shape.layer_kinds[layer], module=DecoderLayer) for layer in here]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def mtp_spec(config: TransformerConfig, shape: ModelShape) -> MultiTokenPredictionBlockSubmodules | None:
    """The MTP layers of this pipeline stage; None where it has none."""
    if not config.mtp_num_layers or get_mtp_num_layers_to_build(config) == 0:
        return None
    layer = ModuleSpec(
        module=MtpLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=RMSNorm,
            hnorm=RMSNorm,
            layer_norm=RMSNorm,
            eh_proj=ColumnParallelLinear,
            mtp_model_layer=layer_spec(config, shape, sparse=shape.moe is not None),
        ),
    )
    return MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * (1 if config.mtp_use_repeated_layer else config.mtp_num_layers))
