"""From a family's shape and a parallel layout to Megatron modules."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig

from mtpctl.errors import UserError
from mtpctl.families.shape import ModelShape
from mtpctl.model.gpt import MtpModel
from mtpctl.model.replay import number_layers
from mtpctl.model.rope import rope_of
from mtpctl.model.spec import decoder_spec, mtp_spec
from mtpctl.plan.sharding import expert_tp, stage_layers
from mtpctl.recipe.model import DTYPES, MtpConfig
from mtpctl.recipe.parallel import ParallelConfig
from mtpctl.recipe.train import MoeConfig
from mtpctl.routes import RouteShape

TORCH_DTYPES: dict[str, torch.dtype] = {precision: getattr(torch, name) for precision, name in DTYPES.items()}
"""By the precision that a recipe names."""


def complete_config(
    config: TransformerConfig,
    shape: ModelShape,
    *,
    parallel: ParallelConfig,
    precision: str,
    mtp: MtpConfig,
    recompute: str = "none",
    moe: MoeConfig | None = None,
) -> TransformerConfig:
    """Write this run's layout and precision into a config that the bridge made. Returns the same object, finalized."""
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
        # Experts are given tokens that are split over tp.
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
        # `mtpctl.model.router` reads the coefficients.
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
    if shape.delta:
        # Layers of different kinds are not stacked in checkpoints.
        settings["hetereogenous_dist_checkpoint"] = True
    if shape.latent:
        scaling = shape.rope_scaling or {}
        settings |= {
            "rope_type": "yarn" if scaling.get("rope_type") == "yarn" else "rope",
            "rotary_scaling_factor": scaling.get("factor", 1.0),
            "mscale_all_dim": scaling.get("mscale_all_dim") or 0.0,
        }
    if parallel.pp > 1:
        settings["pipeline_model_parallel_layout"] = _layout(stage_layers(shape.layers, depths, parallel), depths)
    for name, value in settings.items():
        setattr(config, name, value)
    config.finalize()
    return config


def _layout(stages: list[int], depths: int) -> list[list[str]]:
    rows = [["decoder"] * count for count in stages]
    return [["embedding", *rows[0]], *rows[1:-1], [*rows[-1], *["mtp"] * depths, "loss"]]


def _check_fit(shape: ModelShape, parallel: ParallelConfig) -> None:
    counts = _split_over_tp(shape)
    if any(not _divides(parallel.tp, what, count) for what, count in counts.items()):
        said = " and ".join(f"{count} {what}" for what, count in counts.items())
        fits = [n for n in range(1, shape.heads + 1) if all(_divides(n, what, count) for what, count in counts.items())]
        raise UserError(f"train.parallel.tp: {parallel.tp} does not fit {shape.family}'s {said}; these do: {fits}")
    if parallel.ep > 1 and (shape.moe is None or shape.moe.experts % parallel.ep):
        experts = shape.moe.experts if shape.moe else 0
        raise UserError(f"train.parallel.ep: {parallel.ep} does not divide the {experts} experts of {shape.family}")


def _split_over_tp(shape: ModelShape) -> dict[str, int]:
    counts = {"attention heads": shape.heads, "key-value heads": shape.kv_heads}
    if shape.delta:
        counts |= {"linear key heads": shape.delta.key_heads, "linear value heads": shape.delta.value_heads}
    return counts


def _divides(tp: int, what: str, count: int) -> bool:
    # Where there are fewer key-value heads than ranks, megatron-core lets neighbours share one.
    return count % tp == 0 or (what == "key-value heads" and tp % count == 0)


def build_model(config: TransformerConfig, shape: ModelShape, mtp: MtpConfig) -> MtpModel:
    """The modules of this rank, on its device, without weights yet."""
    model = MtpModel(
        config=config,
        transformer_layer_spec=decoder_spec(config, shape),
        # Rows beyond the vocabulary are never a label and never scored.
        vocab_size=-(-shape.vocab // config.tensor_model_parallel_size) * config.tensor_model_parallel_size,
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        mtp_block_spec=mtp_spec(config, shape),
    )
    model.use_rope(rope_of(shape).on(torch.device(torch.cuda.current_device())))
    if routes := RouteShape.of(shape):
        number_layers(model, routes.layers)
    model.mtp_reads_prenorm = shape.mtp_reads_prenorm
    model.mtp_blanks_first = shape.mtp is not None and shape.mtp.blanks_first
    model.mtp_isolated = mtp.mode == "isolated"
    for layer in model.mtp.layers if model.mtp_process else ():
        layer.recycles_prenorm = shape.mtp is not None and shape.mtp.recycles_prenorm
        if config.mtp_use_repeated_layer:
            # Its depths share keys, which a region that is computed again would not.
            layer.mtp_model_layer.self_attention.checkpoint_core_attention = False
    if model.mtp_process and mtp.mode == "load":
        model.mtp.requires_grad_(False)
    return model.cuda()
