"""Read a Hugging Face config into a `ModelShape`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast, get_args

from mtpctl.errors import UserError
from mtpctl.families.registry import FAMILIES, Family, Flag, MoeFields
from mtpctl.families.shape import DeltaShape, LatentShape, LayerKind, ModelShape, MoeShape, RopeScaling

MTP_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Config fields that name the count of MTP layers, at the top or inside `text_config`."""

EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Config fields that name the count of routed experts."""

ROPE_NUMBERS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (),
}
"""The numbers that each scaling of rotary embeddings needs."""

ROPE_OPTIONS = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor")
"""The numbers that have a default with YaRN."""

MIMO_7B = {"hidden_size": 4096, "num_hidden_layers": 36, "vocab_size": 151680}
MIMO_7B_POSITIONS = 32768
"""The published MiMo-7B config files state another length than the models were trained with."""


def family_of(config: Mapping[str, object]) -> Family:
    """The family of a config, by `architectures`, or by `model_type` where there are none.

    Raises UserError naming what the config says and the families that are known.
    """
    named = _architectures(config)
    model_type = config.get("model_type")
    for family in FAMILIES:
        if any(a in family.architectures for a in named) or (not named and model_type in family.model_types):
            return family
    said = f"architectures {named}" if named else f"model_type {model_type!r}"
    known = ", ".join(f"{family.name} ({family.architectures[0]})" for family in FAMILIES)
    raise UserError(f"model config: {said} is not a known family; known are {known}")


def mtp_layers_of(config: Mapping[str, object]) -> int:
    """The number of MTP layers that a config names, 0 where it names none."""
    for part in (config, _mapping(config, "text_config")):
        for key in MTP_COUNTS:
            if part.get(key):
                return _Fields(part).whole(key)
    return 0


def shape_of(config: Mapping[str, object]) -> ModelShape:
    """Sizes and conventions of the model that `config` (the fields of config.json) describes.

    Raises UserError for an unknown family, and for a field that is missing or does not fit.
    """
    family = family_of(config)
    fields = _Fields({**config, **_mapping(config, "text_config")})
    _check_supported(family, fields)
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    layers, vocab = fields.whole("num_hidden_layers"), fields.whole("vocab_size")
    kv_heads = heads if family.latent else fields.whole("num_key_value_heads", heads)
    latent = _latent(fields) if family.latent else None
    head_dim = latent.nope_dim + latent.rope_dim if latent else fields.whole("head_dim", hidden // heads)
    if heads % kv_heads:
        raise UserError(f"model config: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if family.head_dim_follows_hidden and head_dim * heads != hidden:
        raise UserError(
            f"model config: head_dim {head_dim} is not hidden_size / num_attention_heads = {hidden / heads:g}, as {family.name} needs it"
        )
    mtp_layers = mtp_layers_of(config)
    if mtp_layers and family.mtp is None:
        raise UserError(f"model config: {mtp_layers} MTP layers are named, but the family {family.name} has none")
    if mtp_layers > 1 and family.mtp is not None and family.mtp.shared:
        raise UserError(f"model config: {mtp_layers} MTP layers of {family.name} would share one projection, which is not supported; 1 is")
    moe = _moe(family.moe, fields, layers) if family.moe else None
    rope = _Fields(_mapping(fields.raw, "rope_parameters") or _mapping(fields.raw, "rope_scaling"))
    positions = fields.whole("max_position_embeddings", family.max_positions)
    if family.name == "mimo" and all(config.get(key) == size for key, size in MIMO_7B.items()):
        positions = MIMO_7B_POSITIONS
    return ModelShape(
        family=family.name,
        architecture=next((a for a in _architectures(config) if a in family.architectures), family.architectures[0]),
        prefix=family.prefix,
        hidden=hidden,
        layers=layers,
        ffn=fields.whole("intermediate_size", 0) if moe else fields.whole("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        rope_theta=rope.number("rope_theta", fields.number("rope_theta", family.rope_theta)),
        rope_scaling=_rope_scaling(rope),
        rotary_fraction=rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", family.rotary_fraction)),
        rms_eps=fields.number("rms_norm_eps", family.rms_eps),
        qkv_bias=fields.flag(family.qkv_bias),
        qk_norm=fields.flag(family.qk_norm),
        gated_attention=family.gated_attention,
        tied=_Fields(config if "tie_word_embeddings" in config else fields.raw).switch("tie_word_embeddings", family.tied),
        max_positions=positions,
        mtp_layers=mtp_layers,
        mtp=family.mtp if mtp_layers else None,
        moe=moe,
        latent=latent,
        delta=_delta(family, fields),
        layer_kinds=_layer_kinds(family, fields, layers),
    )


def _check_supported(family: Family, fields: _Fields) -> None:
    """Raise UserError for what an engine would compute and the trainer does not: another policy would be trained than is served."""
    activation = fields.raw.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise UserError(f"model config: hidden_act {activation!r} is not supported; silu is")
    if fields.raw.get("use_sliding_window"):
        raise UserError("model config: use_sliding_window is not supported: every token attends to all before it")
    for key in family.output_biases:
        if fields.switch(key, False):
            raise UserError(f"model config: {key} puts a bias on the output projections of {family.name}, which is not supported")
    for key, value in family.required_values:
        if (said := fields.raw.get(key)) not in (None, value):
            raise UserError(f"model config: {key} {said!r} is not supported for {family.name}; {value!r} is")
    if family.moe and not family.moe.unnormalised_topk and fields.raw.get("norm_topk_prob") is False:
        raise UserError(f"model config: norm_topk_prob false is not supported for {family.name}: the experts' shares sum to 1")


def _rope_scaling(rope: _Fields) -> RopeScaling | None:
    """The config's scaling fields, checked for the numbers that its kind needs; None where RoPE is not scaled."""
    kind = rope.raw.get("rope_type", rope.raw.get("type", "default"))
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in ROPE_NUMBERS:
        raise UserError(f"model config: RoPE scaling {kind!r} is not supported; linear, llama3 and yarn are")
    for key in ROPE_NUMBERS[kind]:
        if rope.raw.get(key) is None:
            raise UserError(f"model config: RoPE scaling {kind!r} lacks {key}")
    for key in (*ROPE_NUMBERS[kind], *ROPE_OPTIONS):
        rope.number(key, 1.0)
    return cast(RopeScaling, dict(rope.raw))


class _Fields:
    """Config fields, read by type. The methods raise UserError for a field that is missing or of another type."""

    def __init__(self, raw: Mapping[str, object]) -> None:
        self.raw = raw

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if value is None:
            raise UserError(f"model config: {key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0 or (value == 0 and default != 0):
            raise UserError(f"model config: {key} must be a positive integer, got {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.raw.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UserError(f"model config: {key} must be a number above 0, got {value!r}")
        return float(value)

    def switch(self, key: str, default: bool) -> bool:
        value = self.raw.get(key, default)
        if value not in (None, False, True):
            raise UserError(f"model config: {key} must be true or false, got {value!r}")
        return bool(value)

    def flag(self, flag: Flag) -> bool:
        return self.switch(flag, False) if isinstance(flag, str) else flag


def _architectures(config: Mapping[str, object]) -> list[str]:
    named = config.get("architectures") or []
    if not isinstance(named, list):
        raise UserError(f"model config: architectures must be a list, got {named!r}")
    return [str(name) for name in named]


def _mapping(config: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise UserError(f"model config: {key} must be an object, got {value!r}")
    return value or {}


def _latent(fields: _Fields) -> LatentShape:
    return LatentShape(
        q_rank=None if fields.raw.get("q_lora_rank") is None else fields.whole("q_lora_rank"),
        kv_rank=fields.whole("kv_lora_rank"),
        nope_dim=fields.whole("qk_nope_head_dim"),
        rope_dim=fields.whole("qk_rope_head_dim"),
        value_dim=fields.whole("v_head_dim"),
    )


def _moe(family: MoeFields, fields: _Fields, layers: int) -> MoeShape:
    counts = [key for key in EXPERT_COUNTS if fields.raw.get(key) is not None]
    ffn = fields.whole("moe_intermediate_size")
    if family.dense == "first":
        dense = frozenset(range(min(layers, fields.whole("first_k_dense_replace", 0))))
    else:
        step, named = fields.whole("decoder_sparse_step", 1), fields.raw.get("mlp_only_layers") or []
        if not isinstance(named, list):
            raise UserError(f"model config: mlp_only_layers must be a list of layers, got {named!r}")
        dense = frozenset(i for i in range(layers) if i in named or (i + 1) % step)
    shared = {
        "none": 0,
        "shared_expert": fields.whole("shared_expert_intermediate_size", 0),
        "shared_experts": ffn * fields.whole("n_shared_experts", 0),
    }[family.shared]
    return MoeShape(
        experts=fields.whole(counts[0] if counts else EXPERT_COUNTS[0]),
        experts_per_token=fields.whole("num_experts_per_tok"),
        ffn=ffn,
        shared_ffn=shared,
        shared_name=family.shared,
        shared_gate=family.shared_gate,
        router_bias=family.router_bias,
        dense_layers=dense,
    )


def _delta(family: Family, fields: _Fields) -> DeltaShape | None:
    if family.delta == "none":
        return None
    return DeltaShape(
        key_heads=fields.whole("linear_num_key_heads", 16),
        value_heads=fields.whole("linear_num_value_heads", 32),
        key_dim=fields.whole("linear_key_head_dim", 128),
        value_dim=fields.whole("linear_value_head_dim", 128),
        conv=fields.whole("linear_conv_kernel_dim", 4),
        fused_projections=family.delta == "fused",
        # Engines read this field in Qwen3.5's configs, and ignore it in Qwen3-Next's.
        fp32_state=family.delta != "fused" and fields.raw.get("mamba_ssm_dtype") == "float32",
    )


def _layer_kinds(family: Family, fields: _Fields, layers: int) -> tuple[LayerKind, ...]:
    kinds: object = ["full_attention"] * layers
    if family.delta != "none":
        every = fields.whole("full_attention_interval", 4)
        alternating = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
        kinds = fields.raw.get("layer_types") or alternating
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in get_args(LayerKind) for kind in kinds):
        raise UserError(f"model config: layer_types must name full_attention or linear_attention for each of {layers} layers")
    return tuple(kinds)
