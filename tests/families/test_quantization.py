"""The matrices that a folder stores in FP8, and the modules that it excludes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mtpctl.families.quantization import find_split_block, list_unquantized_modules, select_fp8_names
from mtpctl.families.reading import shape_of
from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import tensor_shapes
from tests.fakes.toys import QWEN3_5

MIMO_7B: dict[str, Any] = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 151680,
    "num_nextn_predict_layers": 1,
}
LINEAR: dict[str, Any] = QWEN3_5 | {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
    "num_nextn_predict_layers": 1,
}


def kinds(names: frozenset[str], prefix: str) -> set[str]:
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def test_mimo_quantizes_every_projection_of_decoder_and_mtp_layers() -> None:
    shape = shape_of(MIMO_7B)
    names = select_fp8_names(shape)
    layer = {f"self_attn.{part}_proj.weight" for part in "qkvo"} | {f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    for prefix in ("model.layers.0.", "model.layers.1.", "model.mtp_layers.0."):
        assert kinds(names, prefix) == layer
    assert len(names) == 21
    # vLLM numbers MTP layers after the decoder's.
    assert list_unquantized_modules(shape, quantized=names) == ["lm_head", "model.mtp_layers.0.input_proj", "model.layers.2.input_proj"]


def test_deepseek_quantizes_the_matrices_of_its_published_checkpoints() -> None:
    """Including `kv_b_proj`, and `kv_a_proj_with_mqa` whose 576 rows are no multiple of a block."""
    shape = shape_of(DEEPSEEK_V3)
    names = select_fp8_names(shape)
    attention = {f"self_attn.{part}.weight" for part in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}
    parts = [f"{part}_proj.weight" for part in ("gate", "up", "down")]
    assert kinds(names, "model.layers.0.") == attention | {f"mlp.{part}" for part in parts}
    sparse = attention | {f"mlp.{owner}.{part}" for owner in ("experts.0", "experts.1", "shared_experts") for part in parts}
    assert kinds(names, "model.layers.3.") == kinds(names, "model.layers.4.") == sparse
    expected = ["model.layers.3.mlp.gate", "lm_head", "model.layers.4.eh_proj", "model.layers.4.mlp.gate"]
    assert list_unquantized_modules(shape, quantized=names) == expected


@pytest.mark.parametrize(
    ("fields", "excluded"),
    [
        # Blocks would reach from keys into values: vLLM merges the three.
        ({"num_key_value_heads": 1, "num_attention_heads": 64}, {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}),
        ({"intermediate_size": 11072}, {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}),
    ],
)
def test_merged_matrices_that_do_not_fit_blocks_are_excluded_together(fields: dict[str, int], excluded: set[str]) -> None:
    shape = shape_of(MIMO_7B | fields)
    names = select_fp8_names(shape)
    assert names and not any(name.removesuffix(".weight").endswith(tuple(excluded)) for name in names)
    modules = list_unquantized_modules(shape, quantized=names)
    for prefix in ("model.layers.0.", "model.mtp_layers.0.", "model.layers.2."):
        assert {f"{prefix}{part}" for part in excluded} <= set(modules)


def test_experts_of_a_layer_are_one_excluded_module() -> None:
    shape = shape_of(DEEPSEEK_V3 | {"moe_intermediate_size": 1984})
    names = select_fp8_names(shape)
    assert not any(".experts." in name or ".shared_experts." in name for name in names)
    modules = list_unquantized_modules(shape, quantized=names)
    assert "model.layers.3.mlp.experts" in modules and not any(".experts." in module for module in modules)


def test_narrow_models_have_nothing_to_quantize() -> None:
    shape = shape_of(MIMO_7B | {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 100})
    assert not select_fp8_names(shape)


def test_names_are_matrices_of_the_model_without_embeddings_and_norms() -> None:
    shape: ModelShape = replace(shape_of(MIMO_7B), tied=True)
    sizes = tensor_shapes(shape)
    for name in select_fp8_names(shape):
        assert len(sizes[name]) == 2 and "embed" not in name and "norm" not in name and "lm_head" not in name
    assert "lm_head" not in list_unquantized_modules(shape, quantized=select_fp8_names(shape))


@pytest.mark.parametrize(
    ("fields", "tp", "cut"),
    [
        (MIMO_7B, 1, None),
        (MIMO_7B, 2, None),
        # Of 11008 rows a rank has 2752, which is no multiple of 128.
        (MIMO_7B, 4, "model.layers.0.mlp.down_proj.weight (2752 of 11008 columns per rank)"),
        (MIMO_7B | {"intermediate_size": 12288}, 8, None),
        # Each rank has one head of keys, which two ranks share.
        (MIMO_7B | {"intermediate_size": 12288, "num_key_value_heads": 4}, 8, None),
        (
            MIMO_7B | {"intermediate_size": 12288, "num_attention_heads": 64},
            8,
            "model.layers.0.self_attn.k_proj.weight (64 of 512 rows per rank)",
        ),
        # Every rank has the whole of kv_a_proj_with_mqa, with its 576 rows.
        (DEEPSEEK_V3, 8, None),
        # Each rank has 64 rows of queries and of keys, although a quarter of the whole matrix is a multiple of 128.
        (LINEAR, 4, "model.layers.0.linear_attn.in_proj_qkv.weight (64 of 256 rows per rank)"),
        (LINEAR, 2, None),
        (DEEPSEEK_V3, 32, "model.layers.0.mlp.down_proj.weight (576 of 18432 columns per rank)"),
    ],
)
def test_tp_ranks_that_split_fp8_blocks_are_reported(fields: dict[str, Any], tp: int, cut: str | None) -> None:
    shape = shape_of(fields)
    assert find_split_block(shape, select_fp8_names(shape), tp) == cut


def test_drafter_can_be_excluded_from_quantization() -> None:
    shape = shape_of(MIMO_7B)
    assert select_fp8_names(shape) - select_fp8_names(shape, mtp=False) == {
        name for name in select_fp8_names(shape) if ".mtp_layers." in name
    }
    modules = list_unquantized_modules(shape, quantized=select_fp8_names(shape, mtp=False))
    assert {"model.mtp_layers.0.mlp.gate_proj", "model.layers.2.mlp.gate_proj"} <= set(modules)
