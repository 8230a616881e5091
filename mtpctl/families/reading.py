"""Reads a Hugging Face config into a `ModelShape`. Rejects models that an engine refuses or computes differently from the trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec

from mtpctl.errors import PrerequisiteMissing, UserError
from mtpctl.families.fields import (
    PATTERN_FIELD,
    ConfigFields,
    check_supported,
    mixer_of,
    object_field,
    read_layer_pattern,
    read_rope_fields,
)
from mtpctl.families.registry import DFLASH, EAGLE3, FAMILIES, Family, MoeFields, check_architecture, missing_parts
from mtpctl.families.shape import (
    DeltaShape,
    DFlashShape,
    Eagle3Shape,
    LatentShape,
    LayerKind,
    MambaShape,
    ModelShape,
    MoeShape,
    WindowShape,
)

DRAFTER = "drafter"
"""Subfolder of a model's folder with its EAGLE-3 or DFlash drafter, and the key of the drafter's config in the model's config."""

EAGLE3_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
DFLASH_ARCHITECTURE = "DFlashDraftModel"

MTP_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Config fields with the number of MTP layers, at the top level or in `text_config`."""

MIMO_7B_SIZES = {"hidden_size": 4096, "num_hidden_layers": 36, "vocab_size": 151680}
MIMO_7B_POSITIONS = {640000: 32768}
"""Corrections of MiMo-7B's `max_position_embeddings`: some published configs state 640000, its `rope_theta`; it was trained with 32768."""

EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Config fields with the number of routed experts."""

VLLM_CPU_LATENT_WIDTH = 576
"""Latent cache width per token that vLLM 0.32's CPU kernel is compiled for (DeepSeek-V3's)."""


def family_of(config: Mapping[str, object]) -> Family:
    """The family of a config, by its `architectures`, or by its `model_type` if it lists none. Raises UserError for an unknown family."""
    check_architecture(config)
    architectures = _architectures(config)
    model_type = config.get("model_type")
    for family in FAMILIES:
        if any(architecture in family.architectures for architecture in architectures) or (
            not architectures and model_type in family.model_types
        ):
            return family
    field = f"architectures {architectures}" if architectures else f"model_type {model_type!r}"
    known = ", ".join(f"{family.name} ({family.architectures[0]})" for family in FAMILIES)
    lacking_parts = missing_parts(config)
    hint = f", and the trainer has no {' and no '.join(lacking_parts)}" if lacking_parts else ""
    raise UserError(f"model config: {field} is not a known family{hint}; known are {known}")


def mtp_layers_of(config: Mapping[str, object]) -> int:
    """The number of MTP layers in a config; the family's default if it has no such field.

    A drafter in the subfolder `drafter/` counts as one layer.
    """
    if config.get(DRAFTER):
        return 1
    sections = (config, object_field(config, "text_config"))
    counts = (ConfigFields(section).integer(key) for section in sections for key in MTP_COUNTS if section.get(key))
    default = 0 if has_mtp_layers_field(config) else family_of(config).mtp_layers
    return next(counts, default)


def has_mtp_layers_field(config: Mapping[str, object]) -> bool:
    return any(section.get(key) is not None for section in (config, object_field(config, "text_config")) for key in MTP_COUNTS)


def stated_positions(config: Mapping[str, object]) -> int:
    """`max_position_embeddings` of a config, corrected if the published file is wrong."""
    family = family_of(config)
    positions = ConfigFields({**config, **object_field(config, "text_config")}).integer("max_position_embeddings", family.max_positions)
    is_mimo_7b = family.name == "mimo" and all(config.get(key) == size for key, size in MIMO_7B_SIZES.items())
    return MIMO_7B_POSITIONS.get(positions, positions) if is_mimo_7b else positions


def shape_of(config: Mapping[str, object]) -> ModelShape:
    """The model that `config` (the fields of config.json) describes. Raises UserError for an unknown family or an invalid field."""
    family = family_of(config)
    fields = ConfigFields({**config, **object_field(config, "text_config")})
    fields = ConfigFields({**fields.raw, **{standard: fields.raw[name] for name, standard in family.renamed if name in fields.raw}})
    positions = stated_positions(config)
    pattern = read_layer_pattern(fields.raw) if family.layer_pattern else []
    if pattern:
        fields = ConfigFields({**fields.raw, PATTERN_FIELD: pattern})
    check_supported(family, fields, positions)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kinds = _read_layer_kinds(family, fields)
    layers, vocab = len(kinds), fields.integer("vocab_size")
    kv_heads = heads if family.latent else fields.integer("num_key_value_heads", heads)
    latent = _read_latent_shape(fields) if family.latent else None
    head_dim = latent.nope_dim + latent.rope_dim if latent else fields.integer("head_dim", family.head_dim or hidden // heads)
    if heads % kv_heads:
        raise UserError(f"model config: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if family.head_dim_follows_hidden and head_dim * heads != hidden:
        raise UserError(
            f"model config: head_dim {head_dim} is not supported for {family.name}; expected {hidden / heads:g} "
            "(hidden_size / num_attention_heads)"
        )
    mtp_layers = mtp_layers_of(config)
    has_drafter = bool(config.get(DRAFTER))
    if mtp_layers and family.mtp is None and not has_drafter:
        raise UserError(f"model config: {mtp_layers} MTP layers are named, but the family {family.name} has none")
    if mtp_layers > 1 and family.mtp is not None and family.mtp.shared:
        raise UserError(
            f"model config: {mtp_layers} MTP layers of {family.name} would share one projection, which is not supported; expected 1"
        )
    moe = _read_moe_shape(family.moe, fields, layers) if family.moe and (not family.layer_pattern or "moe" in pattern) else None
    if family.layer_pattern and mtp_layers and not has_drafter and (moe is None or "full_attention" not in kinds):
        raise UserError(f"model config: {PATTERN_FIELD} needs at least one attention and one MoE layer, whose sizes the MTP layer uses")
    rope = read_rope_fields(family, fields.raw, positions)
    shape = ModelShape(
        family=family.name,
        architecture=next((a for a in _architectures(config) if a in family.architectures), family.architectures[0]),
        prefix=family.prefix,
        hidden=hidden,
        layers=layers,
        ffn=fields.integer("intermediate_size", 0) if moe or family.layer_pattern else fields.integer("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rotary_fraction=rope.fraction,
        rms_eps=fields.number("rms_norm_eps", family.rms_eps),
        qkv_bias=fields.resolve(family.qkv_bias),
        qk_norm=fields.resolve(family.qk_norm),
        gated_attention=family.gated_attention,
        tied=ConfigFields(config if "tie_word_embeddings" in config else fields.raw).boolean("tie_word_embeddings", family.tied),
        max_positions=rope.positions,
        mtp_layers=mtp_layers,
        mtp=family.mtp if mtp_layers else None,
        moe=moe,
        latent=latent,
        delta=_read_delta_shape(family, fields),
        layer_kinds=kinds,
        value_dim=latent.value_dim if latent else fields.integer("v_head_dim") if family.windows else head_dim,
        value_scale=fields.number("attention_value_scale", 1.0) if family.windows else 1.0,
        window=_read_window_shape(fields, heads) if family.windows else None,
        mamba=_read_mamba_shape(fields) if family.layer_pattern else None,
        embedding=family.embedding,
        norm=family.norm,
    )
    return _add_drafter_shape(config, family, shape) if has_drafter else shape


def _read_latent_shape(fields: ConfigFields) -> LatentShape:
    return LatentShape(
        q_rank=None if fields.raw.get("q_lora_rank") is None else fields.integer("q_lora_rank"),
        kv_rank=fields.integer("kv_lora_rank"),
        nope_dim=fields.integer("qk_nope_head_dim"),
        rope_dim=fields.integer("qk_rope_head_dim"),
        value_dim=fields.integer("v_head_dim"),
    )


def _read_window_shape(fields: ConfigFields, heads: int) -> WindowShape:
    kv_heads = fields.integer("swa_num_key_value_heads")
    if heads % kv_heads:
        raise UserError(f"model config: num_attention_heads {heads} is not a multiple of swa_num_key_value_heads {kv_heads}")
    return WindowShape(
        size=fields.integer("sliding_window_size"),
        kv_heads=kv_heads,
        rope_theta=fields.number("swa_rope_theta", 1.0),
        sinks=fields.boolean("add_swa_attention_sink_bias", False),
    )


def _read_moe_shape(family: MoeFields, fields: ConfigFields, layers: int) -> MoeShape:
    """Counts and widths of the experts, and the dense layers."""
    count_fields = [key for key in EXPERT_COUNTS if fields.raw.get(key) is not None]
    ffn = fields.integer("moe_intermediate_size")
    if family.dense == "first":
        dense_layers = frozenset(range(min(layers, fields.integer("first_k_dense_replace", 0))))
    elif family.dense == "interval":
        start, step = fields.integer("moe_layer_start_index", 0), fields.integer("moe_layer_interval", 1)
        # -1 is the last layer, as in transformers.
        end_index = fields.raw.get("moe_layer_end_index")
        end = layers - 1 if end_index in (None, -1) else fields.integer("moe_layer_end_index")
        dense_layers = frozenset(i for i in range(layers) if not start <= i <= end or (i + 1) % step)
    elif family.dense == "pattern":
        dense_layers = frozenset(i for i, kind in enumerate(_layer_pattern(fields)) if kind == "mlp")
    elif family.dense == "listed":
        dense_layers = frozenset(i for i, sparse in enumerate(_read_layer_flags(fields, "moe_layer_freq", layers)) if not sparse)
    else:
        step, dense_only = fields.integer("decoder_sparse_step", 1), fields.raw.get("mlp_only_layers") or []
        if not isinstance(dense_only, list):
            raise UserError(f"model config: mlp_only_layers must be a list of layers, got {dense_only!r}")
        dense_layers = frozenset(i for i in range(layers) if i in dense_only or (i + 1) % step)
    shared_ffn = {
        "none": 0,
        "shared_expert": fields.integer("shared_expert_intermediate_size", 0),
        "shared_experts": fields.integer("n_shared_experts", int(family.dense == "pattern"))
        * (fields.integer("moe_shared_expert_intermediate_size") if family.dense == "pattern" else ffn),
    }[family.shared]
    return MoeShape(
        experts=fields.integer(count_fields[0] if count_fields else EXPERT_COUNTS[0]),
        experts_per_token=fields.integer("num_experts_per_tok"),
        ffn=ffn,
        shared_ffn=shared_ffn,
        shared_name=family.shared,
        shared_gate=family.shared_gate,
        router_bias=family.router_bias,
        softmax_bias=family.softmax_bias,
        dense_layers=dense_layers,
    )


def _read_delta_shape(family: Family, fields: ConfigFields) -> DeltaShape | None:
    if family.delta == "none":
        return None
    return DeltaShape(
        key_heads=fields.integer("linear_num_key_heads", 16),
        value_heads=fields.integer("linear_num_value_heads", 32),
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        conv=fields.integer("linear_conv_kernel_dim", 4),
        fused_projections=family.delta == "fused",
        # Engines read this field for Qwen3.5 and ignore it for Qwen3-Next.
        fp32_state=family.delta != "fused" and fields.raw.get("mamba_ssm_dtype") == "float32",
    )


def _read_mamba_shape(fields: ConfigFields) -> MambaShape:
    heads, groups = fields.integer("mamba_num_heads"), fields.integer("n_groups")
    if heads % groups:
        raise UserError(f"model config: mamba_num_heads {heads} is not a multiple of n_groups {groups}")
    return MambaShape(
        heads=heads,
        head_dim=fields.integer("mamba_head_dim"),
        groups=groups,
        state=fields.integer("ssm_state_size"),
        conv=fields.integer("conv_kernel"),
        fp32_state=fields.raw.get("mamba_ssm_cache_dtype", "float32") == "float32",
    )


def _layer_pattern(fields: ConfigFields) -> list[str]:
    pattern = fields.raw[PATTERN_FIELD]
    assert isinstance(pattern, list)
    return pattern


def _read_layer_flags(fields: ConfigFields, key: str, layers: int) -> list[int]:
    values = fields.raw.get(key)
    if not isinstance(values, list) or len(values) != layers or not all(value in (0, 1) for value in values):
        raise UserError(f"model config: {key} must be a list of 0 or 1 for each of {layers} layers, got {values!r}")
    return values


def _read_layer_kinds(family: Family, fields: ConfigFields) -> tuple[LayerKind, ...]:
    """The mixer of each decoder layer."""
    if family.layer_pattern:
        return tuple(mixer_of(kind) for kind in _layer_pattern(fields))
    layers = fields.integer("num_hidden_layers")
    if family.windows:
        pattern = _read_layer_flags(fields, "hybrid_layer_pattern", layers)
        return tuple("sliding_attention" if kind else "full_attention" for kind in pattern)
    kinds: object = ["full_attention"] * layers
    if family.delta != "none":
        interval = fields.integer("full_attention_interval", 4)
        alternating = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
        kinds = fields.raw.get("layer_types") or alternating
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in ("full_attention", "linear_attention") for kind in kinds):
        raise UserError(f"model config: layer_types must name full_attention or linear_attention for each of {layers} layers")
    return tuple(kinds)


def _add_drafter_shape(config: Mapping[str, object], family: Family, shape: ModelShape) -> ModelShape:
    """Add the drafter in the subfolder `drafter/` to the shape of its model.

    Raises UserError if the trainer does not support the drafter, or if the drafter does not fit the model.
    """
    drafter_config = config[DRAFTER]
    is_dflash = isinstance(drafter_config, Mapping) and drafter_config.get("architectures") == [DFLASH_ARCHITECTURE]
    description = "a DFlash" if is_dflash else "an EAGLE-3"
    for section in (config, object_field(config, "text_config")):
        if any(section.get(key) for key in MTP_COUNTS):
            raise UserError(f"model config: the model has both MTP layers and {description} drafter; keep one of them")
    if family.mtp is not None:
        raise UserError(f"drafter config: {description} drafter is not supported for {shape.family}; use its MTP layers")
    try:
        drafter = object_field(config, DRAFTER)
        if is_dflash:
            return replace(shape, mtp=DFLASH, dflash=_read_dflash_shape(drafter, shape))
        return replace(shape, mtp=EAGLE3, eagle3=_read_eagle3_shape(drafter, shape))
    except UserError as error:
        # `ConfigFields` and the checks name a model's config in their errors.
        raise UserError(str(error).replace("model config:", "drafter config:", 1)) from error


def _read_eagle3_shape(config: Mapping[str, object], shape: ModelShape) -> Eagle3Shape:
    drafter, names = ConfigFields(config), _architectures(config)
    if not any(name in EAGLE3_ARCHITECTURES for name in names):
        supported = f"{EAGLE3_ARCHITECTURES[0]} and {DFLASH_ARCHITECTURE} are"
        raise UserError(f"drafter config: architectures {names} is not supported; {supported}")
    heads = drafter.integer("num_attention_heads")
    defaults = {"num_key_value_heads": heads, "head_dim": shape.hidden // heads}
    _check_drafter_fits(config, shape, "llama", defaults)
    if (value := drafter.integer("num_hidden_layers")) != 1:
        raise UserError(f"drafter config: num_hidden_layers {value} is not supported with this model; expected 1")
    for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "parallel_drafting"):
        if drafter.boolean(key, False):
            raise UserError(f"drafter config: {key} is not supported: the trainer would compute the drafter without it")
    if config.get("eagle_config"):
        raise UserError("drafter config: eagle_config is not supported; name the layers in eagle_aux_hidden_state_layer_ids")
    stated = config.get("eagle_aux_hidden_state_layer_ids")
    boundaries = tuple(stated) if isinstance(stated, list) and stated else default_boundaries(shape.layers)
    in_range = all(isinstance(each, int) and 0 < each <= shape.layers for each in boundaries)
    if not in_range or list(boundaries) != sorted(set(boundaries)):
        raise UserError(
            f"drafter config: eagle_aux_hidden_state_layer_ids must be increasing numbers from 1 to {shape.layers}, got "
            f"{stated or list(boundaries)!r}"
        )
    # Engines assume three states unless this field has another number.
    if (count := drafter.integer("num_aux_hidden_states", 3)) != len(boundaries):
        raise UserError(f"drafter config: num_aux_hidden_states is {count}, but there are {len(boundaries)} layers to read; set it to that")
    return Eagle3Shape(boundaries, drafter.integer("intermediate_size"))


def _read_dflash_shape(config: Mapping[str, object], shape: ModelShape) -> DFlashShape:
    drafter, dflash_fields = ConfigFields(config), object_field(config, "dflash_config")
    _check_drafter_fits({key: value for key, value in config.items() if key != "is_causal"}, shape, "qwen3", {})
    for key, value in (("is_causal", True), ("is_neox_style", False)):
        if drafter.boolean(key, not value) == value:
            raise UserError(f"drafter config: {key}: {str(value).lower()} is not supported; leave it out")
    for key in dflash_fields:
        # Other trainers write more fields; empty and false values change nothing.
        if key not in ("mask_token_id", "target_layer_ids") and dflash_fields[key]:
            raise UserError(f"drafter config: dflash_config.{key} is not supported: the trainer would compute the drafter without it")
    mask, layers = dflash_fields.get("mask_token_id"), dflash_fields.get("target_layer_ids")
    if not isinstance(mask, int) or not 0 <= mask < shape.vocab:
        raise UserError(f"drafter config: dflash_config.mask_token_id must be a token id below {shape.vocab}, got {mask!r}")
    in_range = isinstance(layers, list) and layers and all(isinstance(each, int) and 0 <= each < shape.layers for each in layers)
    if not isinstance(layers, list) or not in_range or layers != sorted(set(layers)):
        raise UserError(
            f"drafter config: dflash_config.target_layer_ids must be increasing numbers from 0 to {shape.layers - 1}, got {layers!r}"
        )
    return DFlashShape(
        boundaries=tuple(layer + 1 for layer in layers),
        layers=drafter.integer("num_hidden_layers"),
        ffn=drafter.integer("intermediate_size"),
        mask_token=mask,
    )


def _check_drafter_fits(config: Mapping[str, object], shape: ModelShape, kind: str, defaults: Mapping[str, int]) -> None:
    """Raise UserError if the drafter differs from the model in its sizes, the epsilon of its norms or its rotary embedding.

    kind: the family of the drafter's layers. defaults: engines' defaults for missing size fields.
    """
    drafter, family = ConfigFields(config), next(family for family in FAMILIES if family.name == kind)
    sizes = {
        "hidden_size": shape.hidden,
        "target_hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "draft_vocab_size": shape.vocab,
    }
    defaults = {"target_hidden_size": shape.hidden, "draft_vocab_size": shape.vocab, **defaults}
    for key, size in sizes.items():
        if (value := drafter.integer(key, defaults.get(key))) != size:
            raise UserError(f"drafter config: {key} {value} is not supported with this model; expected {size}")
    if (eps := drafter.number("rms_norm_eps", family.rms_eps)) != shape.rms_eps:
        raise UserError(f"drafter config: rms_norm_eps {eps:g} is not supported with this model; expected {shape.rms_eps:g}")
    positions = drafter.integer("max_position_embeddings", family.max_positions)
    check_supported(family, drafter, positions)
    rope = read_rope_fields(family, config, positions)
    if (rope.theta, rope.scaling) != (shape.rope_theta, shape.rope_scaling):
        raise UserError("drafter config: rope_theta and rope_scaling must be the model's; copy them from its config.json")


def default_boundaries(layers: int) -> tuple[int, ...]:
    """The boundaries that engines choose if an EAGLE-3 drafter's config has none: after an early, the middle and a late layer."""
    return 2, layers // 2, layers - 3


def _architectures(config: Mapping[str, object]) -> list[str]:
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        raise UserError(f"model config: architectures must be a list, got {architectures!r}")
    return [str(name) for name in architectures]


def missing_fields(config: Mapping[str, object]) -> Iterator[str]:
    """Yield an error for each missing field whose default differs between engines and trainer."""
    fields = {**config, **object_field(config, "text_config")}
    for key, value in family_of(config).required_values:
        if fields.get(key) is None:
            yield f"model config: {key} is missing, and vLLM's default differs from what the trainer computes; add {key}: {value}"


def unsupported_by_vllm_cpu(shape: ModelShape, dtype: str) -> Iterator[str]:
    """Yield an error for each kind of layer in `dtype` (`fp32` or `bf16`) that vLLM 0.32's CPU kernels do not support."""
    if "linear_attention" in shape.layer_kinds and dtype != "bf16":
        yield f"train.precision: vLLM on a CPU computes the linear attention of {shape.family} only in bf16; set bf16"
    if shape.latent is not None and (width := shape.latent.kv_rank + shape.latent.rope_dim) != VLLM_CPU_LATENT_WIDTH:
        yield (
            f"model config: kv_lora_rank and qk_rope_head_dim add up to {width}, but vLLM on a CPU supports only latent attention of "
            f"{VLLM_CPU_LATENT_WIDTH}; set them to {VLLM_CPU_LATENT_WIDTH - 64} and 64, or use a GPU"
        )


def check_importable(config: Mapping[str, object]) -> None:
    """Raise PrerequisiteMissing if a package that vLLM imports for the model's family is not installed."""
    family = family_of(config)
    for package in family.imports:
        if find_spec(package) is None:
            raise PrerequisiteMissing(
                f"{package}: is not installed, and vLLM needs it to serve {family.name}; reinstall the project, "
                f"or run mtpctl doctor for the release"
            )


_ROPE_FIELDS = ("rope_scaling", "rope_parameters")


def extend_context(config: Mapping[str, object], context: int, scaling: Mapping[str, object] | None = None) -> dict[str, object]:
    """Return a copy of `config` with `context` positions.

    Args:
        context: at least the positions of `config`.
        scaling: fields of RoPE scaling, with transformers' names. None: RoPE is unchanged, so later positions are extrapolated.

    Raises:
        UserError: if `context` is shorter than in `config`, or if the positions with `scaling` are fewer than `context`.
    """
    original = shape_of(config).max_positions
    if context < original:
        raise UserError(f"model.context: the model has {original:,} positions, got {context:,}; use rollout.context for a shorter context")
    result = dict(config)
    for key in ("text_config", DRAFTER):
        if nested := object_field(config, key):
            result[key] = _extend_fields(nested, context, scaling, trained=original)
    if "text_config" not in result:
        result = _extend_fields(result, context, scaling, trained=original)
    if (covered := shape_of(result).max_positions) < context:
        raise UserError(f"model.rope_scaling: covers {covered:,} positions, but model.context is {context:,}; raise its factor")
    return result


def _extend_fields(fields: Mapping[str, object], context: int, scaling: Mapping[str, object] | None, *, trained: int) -> dict[str, object]:
    """One level of a config with `context` positions. `trained`: the positions that the model was trained with."""
    result = {**fields, "max_position_embeddings": context}
    if scaling is not None:
        field = next((name for name in _ROPE_FIELDS if fields.get(name)), _ROPE_FIELDS[0])
        earlier = object_field(fields, field)
        # All scalings except linear need the trained length, which max_position_embeddings no longer states, also not in a config that was
        # extended before.
        length = {"original_max_position_embeddings": earlier.get("original_max_position_embeddings", trained)}
        result[field] = {**earlier, **({} if scaling.get("rope_type") == "linear" else length), **scaling}
    return result


def describe_context(before: ModelShape, after: ModelShape) -> str:
    """Describe in one line how `after` reaches more positions than `before`."""
    positions = f"{after.max_positions:,} positions, {after.max_positions / before.max_positions:.3g} times those of the config"
    if after.rope_scaling == before.rope_scaling:
        return f"{positions}; RoPE as in the config, so later positions are extrapolated"
    assert after.rope_scaling is not None
    return f"{positions}; RoPE scaled by {after.rope_scaling['rope_type']}, factor {after.rope_scaling.get('factor', 1):g}"
