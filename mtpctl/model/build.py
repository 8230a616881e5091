"""Builds Megatron modules from a model's shape and a parallel layout: transformer config, layer specs, model, random weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from megatron.core import parallel_state
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

from mtpctl.errors import UserError
from mtpctl.families.shape import LatentShape, LayerKind, MlpKind, ModelShape, tp_divides
from mtpctl.model.attention import LatentAttention, SelfAttention, WindowAttention, WindowAttentionShape
from mtpctl.model.core_attention import PackedAttention
from mtpctl.model.delta_net import GatedDeltaNet
from mtpctl.model.drafters import BlockAttention, BlockDrafter, BoundaryStates, Eagle3Layer, PairedColumnParallelLinear
from mtpctl.model.experts import Experts, MixtureOfExperts, SharedExperts
from mtpctl.model.gpt import MtpLayer, MtpModel
from mtpctl.model.layers import (
    ColumnParallelLinear,
    GatedRMSNorm,
    LayerNormColumnParallelLinear,
    Mlp,
    RMSNorm,
    RowParallelLinear,
    is_bitwise,
    set_bitwise,
)
from mtpctl.model.mamba import Mamba2
from mtpctl.model.rope import rope_of, window_rope_of
from mtpctl.model.router import DecoderLayer, Router, number_moe_layers, use_softmax_scores
from mtpctl.plan.sharding import expert_tp, stage_layers
from mtpctl.recipe.model import DTYPES, MtpConfig
from mtpctl.recipe.numerics import Numerics
from mtpctl.recipe.section import ParallelConfig
from mtpctl.recipe.train import MoeConfig
from mtpctl.routes import RouteShape

TORCH_DTYPES: dict[str, torch.dtype] = {precision: getattr(torch, name) for precision, name in DTYPES.items()}
"""Dtype of each `precision` in a recipe."""


def complete_config(
    config: TransformerConfig,
    shape: ModelShape,
    *,
    parallel: ParallelConfig,
    precision: str,
    mtp: MtpConfig,
    recompute: str = "none",
    moe: MoeConfig | None = None,
    numerics: Numerics = "default",
) -> TransformerConfig:
    """Set this run's layout and precision in the bridge's config. Returns the same object, finalized."""
    _check_fit(shape, parallel)
    moe = moe or MoeConfig()
    dtype = TORCH_DTYPES[precision]
    depths = 0 if mtp.mode == "off" else shape.mtp_layers * mtp.repeat
    settings: dict[str, object] = {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": expert_tp(parallel),
        # MoE layers expect tokens split over tp.
        "sequence_parallel": parallel.tp > 1 and (parallel.sequence_parallel or shape.moe is not None),
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "bf16": precision == "bf16",
        "fp16": False,
        "autocast_dtype": dtype,
        "variable_seq_lengths": True,
        "calculate_per_token_loss": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "perform_initialization": False,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "cross_entropy_loss_fusion": False,
        "tp_comm_overlap": False,
        "transformer_impl": "local",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        "moe_router_fusion": False,
        "moe_shared_expert_overlap": False,
        "moe_router_dtype": "fp32",
        # `mtpctl.model.router` uses the two coefficients.
        "moe_router_load_balancing_type": "aux_loss" if moe.aux_loss else "none",
        "moe_aux_loss_coeff": moe.aux_loss,
        "moe_z_loss_coeff": moe.z_loss or None,
        "moe_router_bias_update_rate": moe.bias_update,
        "deallocate_pipeline_outputs": False,
        "mtp_num_layers": depths or None,
        "mtp_use_repeated_layer": mtp.repeat > 1,
        "mtp_detach_heads": mtp.mode == "isolated",
        "seq_length": shape.max_positions,
        "position_embedding_type": "rope",
    }
    if recompute == "full":
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif recompute == "selective":
        settings |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    if shape.delta or shape.window or shape.mamba:
        # Checkpoints do not stack layers of different kinds.
        settings["hetereogenous_dist_checkpoint"] = True
    if config.moe_router_num_groups == 1:
        # A single group does not restrict the selection, but would disable the routing kernel.
        settings |= {"moe_router_num_groups": None, "moe_router_group_topk": None}
    if shape.latent:
        scaling = shape.rope_scaling or {}
        settings |= {
            "rope_type": "yarn" if scaling.get("rope_type") == "yarn" else "rope",
            "rotary_scaling_factor": scaling.get("factor", 1.0),
            "mscale_all_dim": scaling.get("mscale_all_dim") or 0.0,
        }
    if parallel.pp > 1:
        settings["pipeline_model_parallel_layout"] = _pipeline_layout(stage_layers(shape.layers, depths, parallel), depths)
    for name, value in settings.items():
        setattr(config, name, value)
    config.finalize()
    if numerics == "bitwise":
        set_bitwise(config)
    return config


def _pipeline_layout(stages: list[int], depths: int) -> list[list[str]]:
    decoders = [["decoder"] * count for count in stages]
    return [["embedding", *decoders[0]], *decoders[1:-1], [*decoders[-1], *["mtp"] * depths, "loss"]]


def _check_fit(shape: ModelShape, parallel: ParallelConfig) -> None:
    counts = shape.tp_counts
    if any(not tp_divides(parallel.tp, name, count) for name, count in counts.items()):
        count_names = " and ".join(f"{count} {name}" for name, count in counts.items())
        valid_sizes = [n for n in range(1, shape.heads + 1) if all(tp_divides(n, name, count) for name, count in counts.items())]
        raise UserError(f"train.parallel.tp: {parallel.tp} does not fit {shape.family}'s {count_names}; these do: {valid_sizes}")
    if parallel.ep > 1 and (shape.moe is None or shape.moe.experts % parallel.ep):
        experts = shape.moe.experts if shape.moe else 0
        raise UserError(f"train.parallel.ep: {parallel.ep} does not divide the {experts} experts of {shape.family}")


def layer_spec(
    config: TransformerConfig,
    shape: ModelShape,
    *,
    mlp: MlpKind,
    kind: LayerKind = "full_attention",
    module: type[TransformerLayer] = TransformerLayer,
) -> ModuleSpec:
    """One transformer layer: grouped-query, window, latent or linear attention or Mamba-2, and a dense MLP or a mixture of experts.

    A layer of Nemotron-H has only a mixer or only an MLP (dense or experts).
    """
    submodules = TransformerLayerSubmodules()
    if kind != "none":
        submodules.input_layernorm = RMSNorm if shape.latent else IdentityOp
        submodules.self_attention, submodules.self_attn_bda = _mixer(config, shape, kind), get_bias_dropout_add
    if mlp != "none":
        submodules.pre_mlp_layernorm = RMSNorm if mlp == "sparse" else IdentityOp
        submodules.mlp, submodules.mlp_bda = _experts() if mlp == "sparse" else _mlp(), get_bias_dropout_add
    return ModuleSpec(module=module, submodules=submodules)


def _mlp() -> MlpBuilder:
    linear = MLPSubmodules(linear_fc1=LayerNormColumnParallelLinear, linear_fc2=RowParallelLinear)
    return partial(Mlp.as_mlp_submodule, submodules=linear)


def _experts() -> MlpBuilder:
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    submodules = MoESubmodules(
        router=Router, experts=partial(Experts, submodules=linear), shared_experts=partial(SharedExperts, submodules=linear)
    )
    return partial(MixtureOfExperts, submodules=submodules)


def _mixer(config: TransformerConfig, shape: ModelShape, kind: LayerKind) -> ModuleSpec:
    if kind == "linear_attention":
        return _delta_net()
    if kind == "mamba":
        return ModuleSpec(module=Mamba2, params={"shape": shape.mamba})
    if shape.window is not None:
        return _window_attention(shape, kind)
    return _latent_attention(shape.latent) if shape.latent else _attention(config)


def _attention(config: TransformerConfig, *, eagle3: bool = False) -> ModuleSpec:
    qk_norm = RMSNorm if config.qk_layernorm and not eagle3 else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=PairedColumnParallelLinear if eagle3 else LayerNormColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )


def _window_attention(shape: ModelShape, kind: LayerKind) -> ModuleSpec:
    window = shape.window if kind == "sliding_attention" else None
    window_shape = WindowAttentionShape(shape.kv_heads_of(kind), shape.value_dim, shape.value_scale, is_window=window is not None)
    return ModuleSpec(
        module=WindowAttention,
        params={"attn_mask_type": AttnMaskType.causal, "window_shape": window_shape},
        submodules=SelfAttentionSubmodules(
            linear_qkv=LayerNormColumnParallelLinear,
            core_attention=partial(PackedAttention, window=window.size, sinks=window.sinks) if window else PackedAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=IdentityOp,
            k_layernorm=IdentityOp,
        ),
    )


def _latent_attention(latent: LatentShape) -> ModuleSpec:
    return ModuleSpec(
        module=LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=UpstreamColumnParallelLinear,  # required by upstream; replaced in `LatentAttention`
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
    offset = get_transformer_layer_offset(config)
    layers = range(offset, offset + get_num_layers_to_build(config))
    specs = [layer_spec(config, shape, mlp=shape.mlp_of(layer), kind=shape.layer_kinds[layer], module=DecoderLayer) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def mtp_spec(config: TransformerConfig, shape: ModelShape) -> MultiTokenPredictionBlockSubmodules | None:
    """The MTP layers of this pipeline stage, or None."""
    if not config.mtp_num_layers or get_mtp_num_layers_to_build(config) == 0:
        return None
    assert shape.mtp is not None
    if shape.dflash is not None:
        params = {"dflash": shape.dflash, "layer": _block_layer()}
        return MultiTokenPredictionBlockSubmodules(layer_specs=[ModuleSpec(module=BlockDrafter, params=params)])
    sparse = shape.moe is not None and shape.eagle3 is None and not shape.mtp.dense
    inner = layer_spec(config, shape, mlp="sparse" if sparse else "dense", kind=shape.mtp_kind)
    if shape.eagle3 is not None:
        inner.submodules.self_attention = _attention(config, eagle3=True)
    layer = ModuleSpec(
        module=MtpLayer if shape.eagle3 is None else Eagle3Layer,
        params={} if shape.eagle3 is None else {"eagle3": shape.eagle3},
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=RMSNorm,
            hnorm=RMSNorm,
            layer_norm=RMSNorm if shape.mtp.final_norm is not None else IdentityOp,
            eh_proj=ColumnParallelLinear,
            mtp_model_layer=inner,
        ),
    )
    return MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * (1 if config.mtp_use_repeated_layer else config.mtp_num_layers))


def _block_layer() -> ModuleSpec:
    """A layer of a DFlash drafter. Its input norm is separate, because the states of the trunk bypass it."""
    attention = ModuleSpec(
        module=BlockAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=RMSNorm,
            k_layernorm=RMSNorm,
        ),
    )
    submodules = TransformerLayerSubmodules(
        input_layernorm=RMSNorm,
        self_attention=attention,
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=IdentityOp,
        mlp=_mlp(),
        mlp_bda=get_bias_dropout_add,
    )
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def build_model(config: TransformerConfig, shape: ModelShape, mtp: MtpConfig) -> MtpModel:
    """The modules of this rank, on its device, with uninitialized weights."""
    model = MtpModel(
        config=config,
        transformer_layer_spec=decoder_spec(config, shape),
        # Padded to a multiple of tp; padding rows are never labels and never scored.
        vocab_size=-(-shape.vocab // config.tensor_model_parallel_size) * config.tensor_model_parallel_size,
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        mtp_block_spec=mtp_spec(config, shape),
    )
    device, window_rope = torch.device(torch.cuda.current_device()), window_rope_of(shape)
    rope = replace(rope_of(shape), exact=is_bitwise(config)).to_device(device) if shape.rotary_fraction else None
    model.use_rope(rope, None if window_rope is None else window_rope.to_device(device))
    if routes := RouteShape.of(shape):
        number_moe_layers(model, routes.layers)
    if shape.moe is not None and shape.moe.softmax_bias:
        use_softmax_scores(model)
    model.mtp_reads_prenorm = shape.mtp_reads_prenorm
    model.mtp_masks_first_embedding = shape.mtp is not None and shape.mtp.blanks_first
    model.mtp_isolated = mtp.mode == "isolated"
    if model.mtp_process and shape.boundaries:
        model.boundary_states = BoundaryStates(model.decoder.layers, model.decoder.final_layernorm, shape.boundaries)
    if model.mtp_process and shape.dflash is not None:
        model.__dict__["block_drafter"] = model.mtp.layers[0]  # not a second submodule
    for layer in model.mtp.layers if model.mtp_process and shape.dflash is None else ():
        layer.passes_prenorm = shape.mtp is not None and shape.mtp.passes_prenorm
        if config.mtp_use_repeated_layer:
            # All depths append to one list of keys; recomputation would append them twice.
            layer.mtp_model_layer.self_attention.checkpoint_core_attention = False
    if model.mtp_process and mtp.mode == "load":
        model.mtp.requires_grad_(False)
    return model.cuda()


@torch.no_grad()
def init_random_weights(model: torch.nn.Module, seed: int) -> None:
    """Initialize weights randomly on the device: norms 1, biases 0, matrices normal(0, 0.02). For benchmarks without trained weights.

    Values depend on seed and layout. Ranks that replicate a part of a parameter get the same values.
    """
    device = next(model.parameters()).device
    stage_offset = 9176 * parallel_state.get_pipeline_model_parallel_rank()
    tp_offset = 1009 * parallel_state.get_tensor_model_parallel_rank()
    expert_offset = 1009 * parallel_state.get_expert_tensor_parallel_rank() + 5003 * parallel_state.get_expert_model_parallel_rank()

    def generator(offset: int) -> torch.Generator:
        return torch.Generator(device).manual_seed(seed + offset)

    offsets = enumerate((stage_offset + tp_offset, stage_offset, stage_offset + expert_offset, tp_offset))
    split, replicated, experts, embedding = (generator(index + offset) for index, offset in offsets)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        if name == "embedding.word_embeddings.weight":  # the last pipeline stage has a copy
            source = embedding
        elif not getattr(parameter, "allreduce", True):
            source = experts
        else:
            source = split if getattr(parameter, "tensor_model_parallel", False) else replicated
        parameter.normal_(0.0, 0.02, generator=source)
