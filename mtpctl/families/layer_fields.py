"""Reads the kinds of a model's decoder layers and their sizes from a Hugging Face config."""

from __future__ import annotations

from mtpctl.errors import UserError
from mtpctl.families.fields import BLOCKS, Fields, mixer_of
from mtpctl.families.registry import Family, MoeFields
from mtpctl.families.shape import DeltaShape, LatentShape, LayerKind, MambaShape, MoeShape, WindowShape

EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Config fields with the number of routed experts."""


def latent_shape(fields: Fields) -> LatentShape:
    """Ranks and widths of latent attention."""
    return LatentShape(
        q_rank=None if fields.raw.get("q_lora_rank") is None else fields.whole("q_lora_rank"),
        kv_rank=fields.whole("kv_lora_rank"),
        nope_dim=fields.whole("qk_nope_head_dim"),
        rope_dim=fields.whole("qk_rope_head_dim"),
        value_dim=fields.whole("v_head_dim"),
    )


def window_shape(fields: Fields, heads: int) -> WindowShape:
    """Sizes of sliding-window attention."""
    kv_heads = fields.whole("swa_num_key_value_heads")
    if heads % kv_heads:
        raise UserError(f"model config: num_attention_heads {heads} is not a multiple of swa_num_key_value_heads {kv_heads}")
    return WindowShape(
        size=fields.whole("sliding_window_size"),
        kv_heads=kv_heads,
        rope_theta=fields.number("swa_rope_theta", 1.0),
        sinks=fields.switch("add_swa_attention_sink_bias", False),
    )


def moe_shape(family: MoeFields, fields: Fields, layers: int) -> MoeShape:
    """Counts and widths of the experts, and the dense layers."""
    counts = [key for key in EXPERT_COUNTS if fields.raw.get(key) is not None]
    ffn = fields.whole("moe_intermediate_size")
    if family.dense == "first":
        dense = frozenset(range(min(layers, fields.whole("first_k_dense_replace", 0))))
    elif family.dense == "interval":
        start, step = fields.whole("moe_layer_start_index", 0), fields.whole("moe_layer_interval", 1)
        # -1 is the last layer, as in transformers.
        last = fields.raw.get("moe_layer_end_index")
        end = layers - 1 if last in (None, -1) else fields.whole("moe_layer_end_index")
        dense = frozenset(i for i in range(layers) if not start <= i <= end or (i + 1) % step)
    elif family.dense == "blocks":
        dense = frozenset(i for i, block in enumerate(_blocks(fields)) if block == "mlp")
    elif family.dense == "listed":
        dense = frozenset(i for i, sparse in enumerate(_per_layer(fields, "moe_layer_freq", layers)) if not sparse)
    else:
        step, dense_only = fields.whole("decoder_sparse_step", 1), fields.raw.get("mlp_only_layers") or []
        if not isinstance(dense_only, list):
            raise UserError(f"model config: mlp_only_layers must be a list of layers, got {dense_only!r}")
        dense = frozenset(i for i in range(layers) if i in dense_only or (i + 1) % step)
    shared = {
        "none": 0,
        "shared_expert": fields.whole("shared_expert_intermediate_size", 0),
        "shared_experts": fields.whole("n_shared_experts", int(family.dense == "blocks"))
        * (fields.whole("moe_shared_expert_intermediate_size") if family.dense == "blocks" else ffn),
    }[family.shared]
    return MoeShape(
        experts=fields.whole(counts[0] if counts else EXPERT_COUNTS[0]),
        experts_per_token=fields.whole("num_experts_per_tok"),
        ffn=ffn,
        shared_ffn=shared,
        shared_name=family.shared,
        shared_gate=family.shared_gate,
        router_bias=family.router_bias,
        softmax_bias=family.softmax_bias,
        dense_layers=dense,
    )


def delta_shape(family: Family, fields: Fields) -> DeltaShape | None:
    """Sizes of linear attention; None if the family has none."""
    if family.delta == "none":
        return None
    return DeltaShape(
        key_heads=fields.whole("linear_num_key_heads", 16),
        value_heads=fields.whole("linear_num_value_heads", 32),
        key_dim=fields.whole("linear_key_head_dim", 128),
        value_dim=fields.whole("linear_value_head_dim", 128),
        conv=fields.whole("linear_conv_kernel_dim", 4),
        fused_projections=family.delta == "fused",
        # Engines read this field for Qwen3.5 and ignore it for Qwen3-Next.
        fp32_state=family.delta != "fused" and fields.raw.get("mamba_ssm_dtype") == "float32",
    )


def mamba_shape(fields: Fields) -> MambaShape:
    """Sizes of Mamba-2."""
    heads, groups = fields.whole("mamba_num_heads"), fields.whole("n_groups")
    if heads % groups:
        raise UserError(f"model config: mamba_num_heads {heads} is not a multiple of n_groups {groups}")
    return MambaShape(
        heads=heads,
        head_dim=fields.whole("mamba_head_dim"),
        groups=groups,
        state=fields.whole("ssm_state_size"),
        conv=fields.whole("conv_kernel"),
        fp32_state=fields.raw.get("mamba_ssm_cache_dtype", "float32") == "float32",
    )


def _blocks(fields: Fields) -> list[str]:
    blocks = fields.raw[BLOCKS]
    assert isinstance(blocks, list)
    return blocks


def _per_layer(fields: Fields, key: str, layers: int) -> list[int]:
    values = fields.raw.get(key)
    if not isinstance(values, list) or len(values) != layers or not all(value in (0, 1) for value in values):
        raise UserError(f"model config: {key} must be a list of 0 or 1 for each of {layers} layers, got {values!r}")
    return values


def layer_kinds(family: Family, fields: Fields) -> tuple[LayerKind, ...]:
    """The mixer of each decoder layer."""
    if family.blocks:
        return tuple(mixer_of(block) for block in _blocks(fields))
    layers = fields.whole("num_hidden_layers")
    if family.windows:
        pattern = _per_layer(fields, "hybrid_layer_pattern", layers)
        return tuple("sliding_attention" if kind else "full_attention" for kind in pattern)
    kinds: object = ["full_attention"] * layers
    if family.delta != "none":
        every = fields.whole("full_attention_interval", 4)
        alternating = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
        kinds = fields.raw.get("layer_types") or alternating
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in ("full_attention", "linear_attention") for kind in kinds):
        raise UserError(f"model config: layer_types must name full_attention or linear_attention for each of {layers} layers")
    return tuple(kinds)
