"""Reads and checks fields of a Hugging Face config: typed access, rotary embeddings, and fields that the trainer does not support.

Rotary embeddings are read as transformers and the engines read them. A config may have `rope_scaling` (the legacy name) and
`rope_parameters`. If both are present, `rope_scaling` replaces `rope_parameters` as a whole. `rope_theta` and `partial_rotary_factor` are
read from the top level of the config if the object lacks them.

A field is rejected if it changes what a model computes and the trainer does not implement it: an engine that applies the field would serve
another policy than the trained one. A field that neither transformers nor the engines read in the model's family is rejected as well: it
would have no effect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

from mtpctl.errors import UserError
from mtpctl.families.registry import Family, Flag
from mtpctl.families.shape import LayerKind, RopeScaling


class ConfigFields:
    """Typed access to config fields. The methods raise UserError for a field that is missing or of another type."""

    def __init__(self, raw: Mapping[str, object]) -> None:
        self.raw = raw

    def integer(self, key: str, default: int | None = None) -> int:
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

    def boolean(self, key: str, default: bool) -> bool:
        value = self.raw.get(key, default)
        if value not in (None, False, True):
            raise UserError(f"model config: {key} must be true or false, got {value!r}")
        return bool(value)

    def resolve(self, flag: Flag) -> bool:
        """The flag's value, or the value of the config field that it names."""
        return self.boolean(flag, False) if isinstance(flag, str) else flag


def object_field(config: Mapping[str, object], key: str) -> Mapping[str, object]:
    """The object at `key`, empty if the key is missing."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise UserError(f"model config: {key} must be an object, got {value!r}")
    return value or {}


REQUIRED_SCALING_FIELDS = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ("factor",)}
"""Required numbers of each kind of RoPE scaling."""

OPTIONAL_SCALING_FIELDS = {
    "linear": (),
    "llama3": ("original_max_position_embeddings",),
    "yarn": ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
}
"""Optional numbers of each kind of RoPE scaling."""

MSCALE_FIELDS = ("mscale", "mscale_all_dim")
"""Optional numbers of YaRN. 0 means that a number is not set."""

WINDOW_FIELDS = (
    *("head_dim", "v_head_dim", "swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim"),
    *("sliding_window_size", "hybrid_layer_pattern", "moe_layer_freq", "rope_theta", "swa_rope_theta", "partial_rotary_factor"),
    *("max_position_embeddings", "layernorm_epsilon", "attention_value_scale", "add_swa_attention_sink_bias", "n_group", "topk_group"),
)
"""Required fields of a family with windows, because the defaults of vLLM and transformers differ. `attention_value_scale` may be null."""

LAYER_KINDS = ("full_attention", "linear_attention", "sliding_attention", "chunked_attention")
"""Keys under which a config defines separate rotary embeddings for each kind of layer."""


@dataclass(frozen=True, slots=True)
class RopeFields:
    """Rotary embedding of a config. theta: base of the wavelengths. fraction: rotated fraction of a head. positions: maximum length."""

    theta: float
    scaling: RopeScaling | None
    fraction: float
    positions: int


def read_rope_fields(family: Family, config: Mapping[str, object], positions: int) -> RopeFields:
    """Read the rotary embedding of a config whose `max_position_embeddings` is `positions`.

    Raises UserError if the trainer does not support the scaling, or if a number is missing or of another type.
    """
    rope, top_level = ConfigFields(object_field(config, "rope_scaling") or object_field(config, "rope_parameters")), ConfigFields(config)
    if family.layer_pattern:
        # Attention has no rotary embedding, although published configs have its fields.
        return RopeFields(top_level.number("rope_theta", family.rope_theta), None, 0.0, positions)
    if family.windows:
        # Engines read only the config's top-level fields, and ignore RoPE scaling.
        rope = ConfigFields({})
    if any(isinstance(rope.raw.get(kind), Mapping) for kind in LAYER_KINDS):
        raise UserError(f"model config: rope_parameters for each kind of layer are not supported for {family.name}; use one for all layers")
    fraction = rope.number("partial_rotary_factor", top_level.number("partial_rotary_factor", family.rotary_fraction))
    if fraction != family.rotary_fraction and not family.windows and (family.rotary_fraction == 1.0 or family.latent):
        # In these families transformers ignores the field, but engines apply it.
        raise UserError(f"model config: partial_rotary_factor {fraction:g} is not supported for {family.name}; expected 1")
    scaling = _read_scaling(family, rope, positions)
    if scaling is not None:
        positions = _supported_positions(scaling, positions)
    return RopeFields(rope.number("rope_theta", top_level.number("rope_theta", family.rope_theta)), scaling, fraction, positions)


def _read_scaling(family: Family, rope: ConfigFields, positions: int) -> RopeScaling | None:
    """The checked scaling fields, None if RoPE is not scaled."""
    kind, legacy = (rope.raw.get(name) for name in ("rope_type", "type"))
    if kind is not None and legacy is not None and kind != legacy:
        raise UserError(f"model config: rope_type {kind!r} and type {legacy!r} contradict each other; keep rope_type")
    kind = kind or legacy or "default"
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in REQUIRED_SCALING_FIELDS:
        raise UserError(f"model config: RoPE scaling {kind!r} is not supported; use linear, llama3 or yarn")
    for key in REQUIRED_SCALING_FIELDS[kind]:
        if rope.raw.get(key) is None:
            raise UserError(f"model config: RoPE scaling {kind!r} lacks {key}")
    for key in (*REQUIRED_SCALING_FIELDS[kind], *OPTIONAL_SCALING_FIELDS[kind]):
        rope.number(key, 1.0)
    if kind == "llama3" and rope.number("low_freq_factor", 1.0) >= rope.number("high_freq_factor", 4.0):
        raise UserError("model config: low_freq_factor of RoPE scaling 'llama3' must be below high_freq_factor")
    if kind == "yarn":
        for key in MSCALE_FIELDS:
            if rope.raw.get(key):
                rope.number(key, 1.0)
        rope.boolean("truncate", True)
    if family.latent:
        _check_latent_scaling(family, kind, rope)
    # All kinds except linear use the length that the model was trained with.
    trained_length = (
        {} if kind == "linear" else {"original_max_position_embeddings": rope.integer("original_max_position_embeddings", positions)}
    )
    return cast(RopeScaling, {**rope.raw, "rope_type": kind, **trained_length})


def _check_latent_scaling(family: Family, kind: str, rope: ConfigFields) -> None:
    """Raise UserError for scalings of latent attention that engines compute differently from transformers.

    Only YaRN is accepted, without `attention_factor`, with truncation, and with both `mscale` and `mscale_all_dim` or neither.
    """
    if kind != "yarn":
        raise UserError(f"model config: RoPE scaling {kind!r} is not supported for {family.name}; expected yarn")
    if rope.raw.get("attention_factor") is not None:
        raise UserError(f"model config: attention_factor is not supported for {family.name}; use mscale and mscale_all_dim")
    if not rope.boolean("truncate", True):
        raise UserError(f"model config: truncate false is not supported for {family.name}; expected true")
    if bool(rope.raw.get("mscale")) != bool(rope.raw.get("mscale_all_dim")):
        raise UserError(f"model config: mscale and mscale_all_dim of {family.name} must both be given, or neither")


def _supported_positions(scaling: RopeScaling, positions: int) -> int:
    """Number of positions for which engines have rotary embeddings. `max_position_embeddings` includes the scaling, unless it is linear."""
    if scaling["rope_type"] == "linear":
        return int(positions * scaling["factor"])
    if scaling["rope_type"] == "yarn":
        return min(positions, int(scaling["original_max_position_embeddings"] * scaling["factor"]))
    return positions


UNSET_VALUES = (None, False, 0, "", "none")
UNIT_VALUES = (None, 1)
UNSUPPORTED_FIELDS = (
    # scores and logits
    *("attn_logit_softcapping", "attn_logit_softcap", "final_logit_softcapping", "logits_soft_cap", "router_logit_softcapping"),
    *("query_pre_attn_scalar", "attention_multiplier", "attn_temperature_tuning", "llama_4_scaling"),
    # states
    *("scale_depth", "layer_scale", "residual_in_fp32", "use_parallel_residual", "parallel_attn", "clip_qkv"),
    # attention
    *("alibi", "no_rope_layer_interval", "attention_chunk_size", "index_topk", "use_sliding_window"),
    # biases
    *("use_bias", "add_bias_linear", "attention_out_bias", "mlp_bias"),
    # experts
    "moe_latent_size",
    # MTP layers
    "mtp_use_dedicated_embeddings",
)
UNIT_FIELDS = ("logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier", "scale_emb", "moe_layer_freq")

NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(UNSUPPORTED_FIELDS, UNSET_VALUES),
    **dict.fromkeys(UNIT_FIELDS, UNIT_VALUES),
    "is_causal": (None, True),
    "position_embedding_type": (None, "rope", "rotary"),
    "dual_chunk_attention_config": (*UNSET_VALUES, {}),
    "rope_interleave": (None, True),
    "moe_gate_act": (None, "softmax"),
}
"""The values of each field that do not change the model; others are rejected. 1 equals 1.0 here, and 0 equals false."""

ACTIVATION_FIELDS = ("hidden_act", "hidden_activation", "activation_function")

UNUSED_SLIDING_WINDOW = ("qwen2", "qwen3", "qwen3-moe", "mimo")
"""Families whose configs have a `sliding_window` that is used only with `use_sliding_window`."""


def check_supported(family: Family, fields: ConfigFields, positions: int) -> None:
    """Raise UserError for a field that changes what the model computes and that the trainer does not implement."""
    for key in ACTIVATION_FIELDS:
        activation = fields.raw.get(key) or "silu"
        if activation not in ("silu", "swish"):
            raise UserError(f"model config: {key} {activation!r} is not supported; use silu")
    _check_biases(family, fields)
    for key, required in family.required_values:
        if (value := fields.raw.get(key)) not in (None, required):
            raise UserError(f"model config: {key} {value!r} is not supported for {family.name}; expected {required!r}")
    for key, neutral in NEUTRAL_VALUES.items():
        value = fields.raw.get(key)
        is_window_field = family.windows and (key == "attention_chunk_size" or (key == "moe_layer_freq" and isinstance(value, list)))
        if value not in neutral and not is_window_field:
            raise UserError(f"model config: {key} {value!r} is not supported: the trainer would compute the model without it")
    if family.layer_pattern:
        check_layer_pattern(family.name, fields.raw)
    _check_windows(family, fields, positions)
    _check_norms_and_gates(family, fields)
    _check_router(family, fields)


def _check_biases(family: Family, fields: ConfigFields) -> None:
    for key in family.output_biases:
        if fields.boolean(key, False):
            raise UserError(f"model config: {key} adds a bias to the output projections of {family.name}, which is not supported")
    expected = family.qkv_bias is True
    if "qkv_bias" in fields.raw and fields.boolean("qkv_bias", expected) != expected:
        raise UserError(
            f"model config: qkv_bias {str(not expected).lower()} is not supported for {family.name}; expected {str(expected).lower()}"
        )


def _check_window_fields(family: Family, fields: ConfigFields) -> None:
    """Check a config of a family with windows.

    Raises UserError if vLLM and transformers read the config differently, or if window layers differ from full-attention layers in the
    number of query heads or the width of heads.
    """
    for key in WINDOW_FIELDS:
        if key not in fields.raw or (fields.raw[key] is None and key != "attention_value_scale"):
            raise UserError(f"model config: {key} is missing; {family.name} needs it, because the defaults of engines differ")
    pattern = fields.raw["hybrid_layer_pattern"]
    layer_types = [{0: "full_attention", 1: "sliding_attention"}.get(kind) for kind in pattern] if isinstance(pattern, list) else None
    required_values = {
        "swa_num_attention_heads": fields.integer("num_attention_heads"),
        "swa_head_dim": fields.integer("head_dim"),
        "swa_v_head_dim": fields.integer("v_head_dim"),
        "sliding_window": fields.integer("sliding_window_size"),
        "layer_types": layer_types,
        "attention_bias": False,
        "add_full_attention_sink_bias": False,
        "routed_scaling_factor": 1,
        "n_shared_experts": 0,
        "moe_router_dtype": "float32",
    }
    for key, value in required_values.items():
        if (stated := fields.raw.get(key)) not in (None, value):
            raise UserError(f"model config: {key} {stated!r} is not supported for {family.name} with this config; expected {value!r}")
    parameters, scaling = object_field(fields.raw, "rope_parameters"), object_field(fields.raw, "rope_scaling")
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        raise UserError(f"model config: rope_scaling is not supported for {family.name}: vLLM ignores it")
    for kind, theta in (("full_attention", "rope_theta"), ("sliding_attention", "swa_rope_theta")):
        rope_of_kind = object_field(parameters, kind) or parameters
        for key, stated in ((theta, rope_of_kind.get("rope_theta")), ("partial_rotary_factor", rope_of_kind.get("partial_rotary_factor"))):
            if stated not in (None, fields.raw[key]) or rope_of_kind.get("rope_type", "default") != "default":
                raise UserError(f"model config: rope_parameters of {kind} differ from {key}, which vLLM reads; make them equal")
    if int(fields.integer("head_dim") * fields.number("partial_rotary_factor", 1.0)) % 2:
        raise UserError(
            "model config: partial_rotary_factor makes the number of rotated dimensions odd; choose a factor for which it is even"
        )
    if fields.integer("v_head_dim") > fields.integer("head_dim"):
        raise UserError(f"model config: v_head_dim above head_dim is not supported for {family.name}")


def _check_windows(family: Family, fields: ConfigFields, positions: int) -> None:
    uses_rope = fields.raw.get("no_rope_layers")  # despite its name, 1 for each layer with rotary embeddings
    if isinstance(uses_rope, list) and not all(uses_rope):
        raise UserError("model config: no_rope_layers is not supported: the trainer applies rotary embeddings in every layer")
    if family.windows:
        _check_window_fields(family, fields)
        return
    layer_types = fields.raw.get("layer_types")
    if isinstance(layer_types, list) and any(kind in ("sliding_attention", "chunked_attention") for kind in layer_types):
        raise UserError(
            "model config: layer_types with windows are not supported: in the trainer every token attends to all previous tokens"
        )
    window = fields.raw.get("sliding_window", family.sliding_window)
    is_unused = window in UNSET_VALUES or family.name in UNUSED_SLIDING_WINDOW or fields.raw.get("use_sliding_window") is False
    if not is_unused and (not isinstance(window, int) or window < positions):
        raise UserError(
            f"model config: sliding_window {window!r} is not supported: in the trainer every token attends to all previous tokens"
        )


def _check_norms_and_gates(family: Family, fields: ConfigFields) -> None:
    for key in ("qk_norm", "use_qk_norm", "qk_layernorm"):
        if key != family.qk_norm and key in fields.raw and fields.boolean(key, False) != fields.resolve(family.qk_norm):
            raise UserError(f"model config: {key} {str(fields.raw[key]).lower()} is not supported for {family.name}")
    if fields.boolean("attn_output_gate", family.gated_attention) != family.gated_attention:
        raise UserError(f"model config: attn_output_gate must be {str(family.gated_attention).lower()} for {family.name}")


def _check_router(family: Family, fields: ConfigFields) -> None:
    if family.moe is None:
        return
    if not family.moe.unnormalised_topk and fields.raw.get("norm_topk_prob") is False:
        raise UserError(f"model config: norm_topk_prob false is not supported for {family.name}: the trainer normalizes routing weights")
    score = "sigmoid" if family.moe.router_bias and not family.moe.softmax_bias else "softmax"
    if (value := fields.raw.get("scoring_func")) not in (None, score):
        raise UserError(f"model config: scoring_func {value!r} is not supported for {family.name}; expected {score!r}")
    if family.moe.router_bias:
        if (value := fields.raw.get("topk_method")) not in (None, "noaux_tc"):
            raise UserError(f"model config: topk_method {value!r} is not supported for {family.name}; expected 'noaux_tc'")
        if fields.integer("n_group", 1) > 1 and (experts := fields.integer("num_experts_per_tok")) // fields.integer("topk_group", 1) != 2:
            # Engines rank groups by their two best experts; Megatron by num_experts_per_tok // topk_group of them.
            topk_group = fields.integer("topk_group", 1)
            raise UserError(
                f"model config: topk_group {topk_group} with num_experts_per_tok {experts} is not supported; expected {experts // 2}"
            )
        return
    for key in ("routed_scaling_factor", "n_group", "topk_group"):
        if (value := fields.raw.get(key)) not in (*UNSET_VALUES, 1):
            raise UserError(f"model config: {key} {value!r} is not supported for {family.name}; expected 1")


class PatternKind(NamedTuple):
    """A kind of layer: its names in transformers 5 and in legacy configs, its letter in a pattern, and its mixer."""

    name: str
    legacy: str
    letter: str
    mixer: LayerKind


PATTERN_KINDS = (
    PatternKind("linear_attention", "mamba", "M", "mamba"),
    PatternKind("full_attention", "attention", "*", "full_attention"),
    PatternKind("moe", "moe", "E", "none"),
    PatternKind("mlp", "mlp", "-", "none"),
)

PATTERN_FIELD = "layers_block_type"
"""Config field with the kind of each layer. Older configs have a pattern of letters instead."""
_MTP_PATTERN_FIELD = "mtp_layers_block_type"
_LETTER_FIELDS = {PATTERN_FIELD: "hybrid_override_pattern", _MTP_PATTERN_FIELD: "mtp_hybrid_override_pattern"}
_SUPPORTED_MTP_PATTERN = ["full_attention", "moe"]
_FIXED_VALUES = {"mamba_hidden_act": "silu", "mlp_hidden_act": "relu2", "use_conv_bias": True, "n_shared_experts": 1}
"""Config fields, each with the only supported value, which is also the default of engines."""
_INFINITIES: tuple[object, ...] = (math.inf, "Infinity", {"__float__": "Infinity"})
"""The representations of infinity in configs."""


def read_layer_pattern(config: Mapping[str, object], key: str = PATTERN_FIELD) -> list[str]:
    """The kind of each layer, by its name in transformers 5. Raises UserError if the config does not list them."""
    stated, pattern = config.get(key), config.get(_LETTER_FIELDS[key])
    if stated is None and isinstance(pattern, str):
        stated = list(pattern)
    if stated is None and key == _MTP_PATTERN_FIELD:
        stated = _SUPPORTED_MTP_PATTERN
    names = {spelling: kind.name for kind in PATTERN_KINDS for spelling in kind[:3]}
    if not isinstance(stated, list) or not stated or not all(str(kind) in names for kind in stated):
        raise UserError(f"model config: {key} must list {', '.join(kind.name for kind in PATTERN_KINDS)} for the layers, got {stated!r}")
    return [names[str(kind)] for kind in stated]


def mixer_of(layer: str) -> LayerKind:
    return next(kind.mixer for kind in PATTERN_KINDS if kind.name == layer)


def check_layer_pattern(family: str, config: Mapping[str, object]) -> None:
    """Raise UserError for fields of a Nemotron-H config that an engine refuses, or that make it compute another model than the trainer."""
    layers, mtp_pattern = len(read_layer_pattern(config)), read_layer_pattern(config, _MTP_PATTERN_FIELD)
    if (stated := config.get("num_hidden_layers")) not in (None, layers):
        raise UserError(f"model config: num_hidden_layers is {stated!r}, but {PATTERN_FIELD} has {layers}; make them equal")
    if mtp_pattern != _SUPPORTED_MTP_PATTERN:
        raise UserError(
            f"model config: {_MTP_PATTERN_FIELD} {mtp_pattern} is not supported for {family}; expected {_SUPPORTED_MTP_PATTERN}"
        )
    for key, value in _FIXED_VALUES.items():
        if (stated := config.get(key)) not in (None, value):
            raise UserError(f"model config: {key} {stated!r} is not supported for {family}; expected {value!r}")
    if (limit := config.get("time_step_limit")) is not None and limit not in [[0, infinity] for infinity in _INFINITIES]:
        raise UserError(f"model config: time_step_limit {limit!r} is not supported for {family}: vLLM ignores it; remove it")
