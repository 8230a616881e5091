"""Config fields that change what a model computes and that the trainer does not implement.

An engine that applies such a field would serve a different policy from the trained one. A field that neither transformers nor the engines
read in the model's family is rejected as well, because the intended model is not the one that they compute.
"""

from __future__ import annotations

from mtpctl.errors import UserError
from mtpctl.families.fields import Fields
from mtpctl.families.registry import Family

OFF = (None, False, 0, "", "none")
ONE = (None, 1)

NEUTRAL: dict[str, tuple[object, ...]] = {
    # scores and logits
    "attn_logit_softcapping": OFF,
    "attn_logit_softcap": OFF,
    "final_logit_softcapping": OFF,
    "logits_soft_cap": OFF,
    "router_logit_softcapping": OFF,
    "logit_scale": ONE,
    "logits_scaling": ONE,
    "query_pre_attn_scalar": OFF,
    "attention_multiplier": OFF,
    "attn_temperature_tuning": OFF,
    "llama_4_scaling": OFF,
    # states
    "embedding_multiplier": ONE,
    "residual_multiplier": ONE,
    "scale_emb": ONE,
    "scale_depth": OFF,
    "layer_scale": OFF,
    "use_parallel_residual": OFF,
    "parallel_attn": OFF,
    "clip_qkv": OFF,
    # attention
    "alibi": OFF,
    "is_causal": (None, True),
    "position_embedding_type": (None, "rope", "rotary"),
    "no_rope_layer_interval": OFF,
    "attention_chunk_size": OFF,
    "dual_chunk_attention_config": (*OFF, {}),
    "index_topk": OFF,
    "use_sliding_window": OFF,
    "rope_interleave": (None, True),
    # biases
    "use_bias": OFF,
    "add_bias_linear": OFF,
    "attention_out_bias": OFF,
    "mlp_bias": OFF,
    # experts and MTP layers
    "moe_layer_freq": ONE,
    "mtp_use_dedicated_embeddings": OFF,
}
"""Accepted values of each field, which change nothing. 1 equals 1.0 here, and 0 equals false."""

ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")

WINDOWLESS = ("qwen2", "qwen3", "qwen3-moe", "mimo")
"""Families whose configs state a `sliding_window` that is used only with `use_sliding_window`."""


def check_supported(family: Family, fields: Fields, positions: int) -> None:
    """Raise UserError naming a field that changes what the model computes and that the trainer does not implement."""
    for key in ACTIVATIONS:
        activation = fields.raw.get(key) or "silu"
        if activation not in ("silu", "swish"):
            raise UserError(f"model config: {key} {activation!r} is not supported; silu is")
    _check_biases(family, fields)
    for key, value in family.required_values:
        if (said := fields.raw.get(key)) not in (None, value):
            raise UserError(f"model config: {key} {said!r} is not supported for {family.name}; {value!r} is")
    for key, neutral in NEUTRAL.items():
        if (said := fields.raw.get(key)) not in neutral:
            raise UserError(f"model config: {key} {said!r} is not supported: the trainer would compute the model without it")
    _check_windows(family, fields, positions)
    _check_norms_and_gates(family, fields)
    _check_router(family, fields)


def _check_biases(family: Family, fields: Fields) -> None:
    for key in family.output_biases:
        if fields.switch(key, False):
            raise UserError(f"model config: {key} puts a bias on the output projections of {family.name}, which is not supported")
    wanted = family.qkv_bias is True
    if "qkv_bias" in fields.raw and fields.switch("qkv_bias", wanted) != wanted:
        raise UserError(f"model config: qkv_bias {str(not wanted).lower()} is not supported for {family.name}; {str(wanted).lower()} is")


def _check_windows(family: Family, fields: Fields, positions: int) -> None:
    kinds = fields.raw.get("layer_types")
    if isinstance(kinds, list) and any(kind in ("sliding_attention", "chunked_attention") for kind in kinds):
        raise UserError("model config: layer_types with windows are not supported: every token attends to all before it")
    window = fields.raw.get("sliding_window")
    unused = window in OFF or family.name in WINDOWLESS or fields.raw.get("use_sliding_window") is False
    if not unused and (not isinstance(window, int) or window < positions):
        raise UserError(f"model config: sliding_window {window!r} is not supported: every token attends to all before it")
    layers = fields.raw.get("no_rope_layers")
    if isinstance(layers, list) and not all(layers):
        raise UserError("model config: no_rope_layers is not supported: every layer has rotary embeddings")


def _check_norms_and_gates(family: Family, fields: Fields) -> None:
    for key in ("qk_norm", "use_qk_norm", "qk_layernorm"):
        if key != family.qk_norm and key in fields.raw and fields.switch(key, False) != fields.flag(family.qk_norm):
            raise UserError(f"model config: {key} {str(fields.raw[key]).lower()} is not supported for {family.name}")
    if fields.switch("attn_output_gate", family.gated_attention) != family.gated_attention:
        raise UserError(f"model config: attn_output_gate must be {str(family.gated_attention).lower()} for {family.name}")


def _check_router(family: Family, fields: Fields) -> None:
    if family.moe is None:
        return
    if not family.moe.unnormalised_topk and fields.raw.get("norm_topk_prob") is False:
        raise UserError(f"model config: norm_topk_prob false is not supported for {family.name}: the experts' shares sum to 1")
    score = "sigmoid" if family.moe.router_bias else "softmax"
    if (said := fields.raw.get("scoring_func")) not in (None, score):
        raise UserError(f"model config: scoring_func {said!r} is not supported for {family.name}; {score!r} is")
    if family.moe.router_bias:
        if (said := fields.raw.get("topk_method")) not in (None, "noaux_tc"):
            raise UserError(f"model config: topk_method {said!r} is not supported for {family.name}; 'noaux_tc' is")
        return
    for key in ("routed_scaling_factor", "n_group", "topk_group"):
        if (said := fields.raw.get(key)) not in (*OFF, 1):
            raise UserError(f"model config: {key} {said!r} is not supported for {family.name}; 1 is")
