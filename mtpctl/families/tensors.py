"""Names and shapes of the tensors in a model's Hugging Face checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from math import prod
from typing import Literal

from mtpctl.families.shape import DFlashShape, Eagle3Shape, LayerKind, MambaShape, MlpKind, ModelShape, MtpConvention

Shape = tuple[int, ...]
TensorShapes = Iterator[tuple[str, Shape]]

MTP_EXPERT_LAYER = "mtp.layers.1."
"""Prefix of the experts of Nemotron-H's MTP layer. Checkpoints and vLLM number them as a second MTP layer."""


def tensor_shapes(shape: ModelShape) -> dict[str, Shape]:
    """The shapes of the checkpoint's tensors: embedding, decoder layers, final norm, head, MTP layers. A tied head is not stored.

    Each expert has its own tensors, although some published folders pack them. Vision towers are excluded.
    """
    tensors: dict[str, Shape] = {shape.embedding_name: (shape.vocab, shape.hidden)}
    for index, kind in enumerate(shape.layer_kinds):
        prefix, mlp = f"{shape.prefix}layers.{index}.", shape.mlp_of(index)
        tensors.update(
            _layer_tensors(shape, prefix, kind, mlp == "sparse")
            if shape.mamba is None
            else _pattern_layer_tensors(shape, shape.mamba, prefix, kind, mlp)
        )
    tensors[shape.norm_name] = (shape.hidden,)
    if not shape.tied:
        tensors["lm_head.weight"] = (shape.vocab, shape.hidden)
    for depth in range(shape.mtp_layers):
        tensors.update(_mtp_tensors(shape, depth))
    return tensors


def aliases(shape: ModelShape) -> dict[str, str]:
    """Map the name of each duplicate tensor to its original's name: a tied head, and MTP copies of embedding and head."""
    embedding = shape.embedding_name
    head = embedding if shape.tied else "lm_head.weight"
    originals = {"lm_head.weight": embedding} if shape.tied else {}
    if shape.mtp:
        for depth in range(shape.mtp_layers):
            for template, original in ((shape.mtp.embedding_copy, embedding), (shape.mtp.head_copy, head)):
                if template:
                    originals[shape.mtp.name(template, depth, shape.layers)] = original
    return originals


def section_of(name: str, shape: ModelShape) -> Literal["target", "draft"]:
    """Whether a tensor belongs to the trunk (`target`) or to the MTP layers (`draft`)."""
    if shape.mtp is None:
        return "target"
    root = shape.mtp.layer.partition(".")[0]
    if root in ("mtp", "drafter"):
        return "draft" if name.startswith(f"{root}.") else "target"
    inputs = (shape.mtp.embedding_norm, shape.mtp.hidden_norm, shape.mtp.projection)
    for template in (shape.mtp.layer, *inputs):
        if (match := _template_pattern(template).match(name)) is not None:
            # A template with `{n}` also matches decoder layers, which have the lower numbers.
            return "draft" if int(match.groupdict().get("n", shape.layers)) >= shape.layers else "target"
    return "target"


@cache
def _template_pattern(template: str) -> re.Pattern[str]:
    """A pattern for the start of the names that a template of `MtpConvention` has for any depth `k` and layer `n`."""
    return re.compile(re.escape(template).replace(r"\{k\}", "[0-9]+").replace(r"\{n\}", "(?P<n>[0-9]+)"))


def count_parameters(shape: ModelShape) -> dict[str, int]:
    """Parameter counts without aliases: `total`, and its parts `mtp`, `embedding`, `head` and `experts` (routed, also those in `mtp`)."""
    if shape.moe is None or shape.moe.experts <= 2:
        return _count_by_part(shape)
    # Every count is linear in the number of experts. Listing all experts takes seconds for the largest models.
    with_one_expert, with_two_experts = (_count_by_part(replace(shape, moe=replace(shape.moe, experts=experts))) for experts in (1, 2))
    return {
        part: with_one_expert[part] + (with_two_experts[part] - with_one_expert[part]) * (shape.moe.experts - 1) for part in with_one_expert
    }


def _count_by_part(shape: ModelShape) -> dict[str, int]:
    duplicates = aliases(shape)
    sizes = {name: prod(size) for name, size in tensor_shapes(shape).items() if name not in duplicates}
    return {
        "total": sum(sizes.values()),
        "mtp": sum(count for name, count in sizes.items() if section_of(name, shape) == "draft"),
        "embedding": sizes[shape.embedding_name],
        "head": sizes.get("lm_head.weight", 0),
        "experts": sum(count for name, count in sizes.items() if ".experts." in name),
    }


def _linear_tensors(name: str, rows: int, columns: int, bias: bool = False) -> TensorShapes:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _layer_tensors(
    shape: ModelShape, prefix: str, kind: LayerKind, sparse: bool, mlp_norm: str = "post_attention_layernorm"
) -> TensorShapes:
    yield f"{prefix}input_layernorm.weight", (shape.hidden,)
    if kind == "linear_attention":
        yield from _delta_tensors(shape, f"{prefix}linear_attn.")
    elif shape.latent:
        yield from _latent_tensors(shape, f"{prefix}self_attn.")
    else:
        yield from _attention_tensors(shape, f"{prefix}self_attn.", kind)
    yield f"{prefix}{mlp_norm}.weight", (shape.hidden,)
    if sparse:
        yield from _expert_tensors(shape, f"{prefix}mlp.")
    else:
        yield from _mlp_tensors(shape, f"{prefix}mlp.", shape.ffn)


def _pattern_layer_tensors(shape: ModelShape, mamba: MambaShape, prefix: str, kind: LayerKind, mlp: MlpKind) -> TensorShapes:
    """A layer of Nemotron-H: one norm, and one mixer or MLP."""
    yield f"{prefix}norm.weight", (shape.hidden,)
    mixer = f"{prefix}mixer."
    if kind == "mamba":
        yield from _mamba_tensors(shape, mamba, mixer)
    elif kind == "full_attention":
        yield from _attention_tensors(shape, mixer, kind)
    elif mlp == "sparse":
        yield from _expert_tensors(shape, mixer)
    else:
        yield from _mlp_tensors(shape, mixer, shape.ffn)


def _mamba_tensors(shape: ModelShape, mamba: MambaShape, prefix: str) -> TensorShapes:
    for name in ("A_log", "D", "dt_bias"):
        yield f"{prefix}{name}", (mamba.heads,)
    yield f"{prefix}conv1d.weight", (mamba.channels, 1, mamba.conv)
    yield f"{prefix}conv1d.bias", (mamba.channels,)
    yield from _linear_tensors(f"{prefix}in_proj", mamba.inner + mamba.channels + mamba.heads, shape.hidden)
    yield f"{prefix}norm.weight", (mamba.inner,)
    yield from _linear_tensors(f"{prefix}out_proj", shape.hidden, mamba.inner)


def _attention_tensors(shape: ModelShape, prefix: str, kind: LayerKind) -> TensorShapes:
    query_width, kv_heads = shape.heads * shape.head_dim, shape.kv_heads_of(kind)
    yield from _linear_tensors(f"{prefix}q_proj", query_width * (2 if shape.gated_attention else 1), shape.hidden, shape.qkv_bias)
    yield from _linear_tensors(f"{prefix}k_proj", kv_heads * shape.head_dim, shape.hidden, shape.qkv_bias)
    yield from _linear_tensors(f"{prefix}v_proj", kv_heads * shape.value_dim, shape.hidden, shape.qkv_bias)
    yield from _linear_tensors(f"{prefix}o_proj", shape.hidden, shape.heads * shape.value_dim)
    if kind == "sliding_attention" and shape.window is not None and shape.window.sinks:
        yield f"{prefix}attention_sink_bias", (shape.heads,)
    if shape.qk_norm:
        yield f"{prefix}q_norm.weight", (shape.head_dim,)
        yield f"{prefix}k_norm.weight", (shape.head_dim,)


def _latent_tensors(shape: ModelShape, prefix: str) -> TensorShapes:
    latent = shape.latent
    assert latent is not None
    query_width = shape.heads * (latent.nope_dim + latent.rope_dim)
    if latent.q_rank is None:
        yield from _linear_tensors(f"{prefix}q_proj", query_width, shape.hidden)
    else:
        yield from _linear_tensors(f"{prefix}q_a_proj", latent.q_rank, shape.hidden)
        yield f"{prefix}q_a_layernorm.weight", (latent.q_rank,)
        yield from _linear_tensors(f"{prefix}q_b_proj", query_width, latent.q_rank)
    yield from _linear_tensors(f"{prefix}kv_a_proj_with_mqa", latent.kv_rank + latent.rope_dim, shape.hidden)
    yield f"{prefix}kv_a_layernorm.weight", (latent.kv_rank,)
    yield from _linear_tensors(f"{prefix}kv_b_proj", shape.heads * (latent.nope_dim + latent.value_dim), latent.kv_rank)
    yield from _linear_tensors(f"{prefix}o_proj", shape.hidden, shape.heads * latent.value_dim)


def _delta_tensors(shape: ModelShape, prefix: str) -> TensorShapes:
    delta = shape.delta
    assert delta is not None
    key_width, value_width = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
    yield f"{prefix}A_log", (delta.value_heads,)
    yield f"{prefix}dt_bias", (delta.value_heads,)
    yield f"{prefix}conv1d.weight", (2 * key_width + value_width, 1, delta.conv)
    if delta.fused_projections:
        yield from _linear_tensors(f"{prefix}in_proj_qkvz", 2 * key_width + 2 * value_width, shape.hidden)
        yield from _linear_tensors(f"{prefix}in_proj_ba", 2 * delta.value_heads, shape.hidden)
    else:
        yield from _linear_tensors(f"{prefix}in_proj_qkv", 2 * key_width + value_width, shape.hidden)
        yield from _linear_tensors(f"{prefix}in_proj_z", value_width, shape.hidden)
        yield from _linear_tensors(f"{prefix}in_proj_b", delta.value_heads, shape.hidden)
        yield from _linear_tensors(f"{prefix}in_proj_a", delta.value_heads, shape.hidden)
    yield f"{prefix}norm.weight", (delta.value_dim,)
    yield from _linear_tensors(f"{prefix}out_proj", shape.hidden, value_width)


def _mlp_tensors(shape: ModelShape, prefix: str, ffn: int) -> TensorShapes:
    if shape.mamba is None:
        yield from _linear_tensors(f"{prefix}gate_proj", ffn, shape.hidden)
    yield from _linear_tensors(f"{prefix}up_proj", ffn, shape.hidden)
    yield from _linear_tensors(f"{prefix}down_proj", shape.hidden, ffn)


def _expert_tensors(shape: ModelShape, prefix: str) -> TensorShapes:
    moe = shape.moe
    assert moe is not None
    yield f"{prefix}gate.weight", (moe.experts, shape.hidden)
    if moe.softmax_bias:
        yield f"{prefix}moe_statics.e_score_correction_bias", (1, moe.experts)
    elif moe.router_bias:
        yield f"{prefix}gate.e_score_correction_bias", (moe.experts,)
    for expert in range(moe.experts):
        yield from _mlp_tensors(shape, f"{prefix}experts.{expert}.", moe.ffn)
    if moe.shared_ffn:
        yield from _mlp_tensors(shape, f"{prefix}{moe.shared_name}.", moe.shared_ffn)
        if moe.shared_gate:
            yield f"{prefix}{moe.shared_name}_gate.weight", (1, shape.hidden)


def _mtp_tensors(shape: ModelShape, depth: int) -> Mapping[str, Shape]:
    mtp, hidden = shape.mtp, shape.hidden
    assert mtp is not None
    if shape.eagle3 is not None:
        return _eagle3_tensors(shape, shape.eagle3, mtp)
    if shape.dflash is not None:
        return _dflash_tensors(shape, shape.dflash, mtp)
    templates: dict[str | None, Shape] = {
        mtp.embedding_norm: (hidden,),
        mtp.hidden_norm: (hidden,),
        mtp.projection: (hidden, 2 * hidden),
        mtp.embedding_copy: (shape.vocab, hidden),
        mtp.head_copy: (shape.vocab, hidden),
        mtp.final_norm: (hidden,),
    }
    tensors = {mtp.name(template, depth, shape.layers): size for template, size in templates.items() if template}
    if shape.mamba is not None:
        tensors.update(_pattern_layer_tensors(shape, shape.mamba, mtp.layer, "full_attention", "none"))
        tensors.update(_pattern_layer_tensors(shape, shape.mamba, MTP_EXPERT_LAYER, "none", "sparse"))
        return tensors
    sparse = shape.moe is not None and not mtp.dense
    tensors.update(_layer_tensors(shape, mtp.name(mtp.layer, depth, shape.layers), mtp.kind, sparse, mtp.mlp_norm))
    return tensors


def _eagle3_tensors(shape: ModelShape, eagle3: Eagle3Shape, mtp: MtpConvention) -> Mapping[str, Shape]:
    hidden, query_width, kv_width = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = f"{mtp.layer}self_attn."
    assert mtp.final_norm is not None
    num_states = len(eagle3.boundaries)  # states of the trunk that the drafter reads per token
    return {
        mtp.projection: (hidden, hidden * num_states),
        mtp.embedding_norm: (hidden,),
        mtp.hidden_norm: (hidden,),
        f"{attention}q_proj.weight": (query_width, 2 * hidden),
        f"{attention}k_proj.weight": (kv_width, 2 * hidden),
        f"{attention}v_proj.weight": (kv_width, 2 * hidden),
        f"{attention}o_proj.weight": (hidden, query_width),
        f"{mtp.layer}post_attention_layernorm.weight": (hidden,),
        **dict(_mlp_tensors(shape, f"{mtp.layer}mlp.", eagle3.ffn)),
        mtp.final_norm: (hidden,),
    }


def _dflash_tensors(shape: ModelShape, dflash: DFlashShape, mtp: MtpConvention) -> Mapping[str, Shape]:
    hidden = shape.hidden
    layer_shape = replace(shape, ffn=dflash.ffn, qkv_bias=False, qk_norm=True, gated_attention=False)
    assert mtp.final_norm is not None
    num_states = len(dflash.boundaries)  # states of the trunk that the drafter reads per token
    tensors = {mtp.projection: (hidden, hidden * num_states), mtp.hidden_norm: (hidden,), mtp.final_norm: (hidden,)}
    for index in range(dflash.layers):
        tensors.update(_layer_tensors(layer_shape, f"drafter.layers.{index}.", "full_attention", sparse=False))
    return tensors
