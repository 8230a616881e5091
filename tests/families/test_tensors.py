"""Tensor names and shapes equal those that transformers writes, and MTP names those that Megatron-Bridge maps."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from mtpctl.families.configs import hub_config
from mtpctl.families.reading import shape_of
from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import aliases, count_parameters, section_of, tensor_shapes

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SHARED: dict[str, Any] = {"shared_expert_intermediate_size": 40}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
ERNIE: dict[str, Any] = {
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_num_shared_experts": 2,
    "moe_intermediate_size": 48,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
WINDOWS: dict[str, Any] = {
    **{name: value for name, value in ROUTED.items() if name not in ("n_shared_experts", "first_k_dense_replace")},
    "head_dim": 32,
    "v_head_dim": 24,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 32,
    "swa_v_head_dim": 24,
    "sliding_window": 9,
    "sliding_window_size": 9,
    "hybrid_layer_pattern": [0, 1, 0],
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "moe_layer_freq": [0, 1, 1],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "add_swa_attention_sink_bias": True,
    "rope_theta": 5000000.0,
    "swa_rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "layernorm_epsilon": 1e-5,
}

VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}

BLOCKS: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "head_dim": 32,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "n_groups": 3,
    "ssm_state_size": 10,
    "conv_kernel": 3,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-moe": ("Qwen3Moe", {"head_dim": 32, **MOE, "mlp_only_layers": [1]}),
    "qwen3-moe-sparse-step": ("Qwen3Moe", {"head_dim": 32, **MOE, "decoder_sparse_step": 2}),
    "llama": ("Llama", {"head_dim": 32}),
    "deepseek-v3": ("DeepseekV3", {**ROUTED, **LATENT}),
    "deepseek-v3-full-query": ("DeepseekV3", {**ROUTED, **LATENT, "q_lora_rank": None}),
    "glm4-moe": ("Glm4Moe", {"head_dim": 32, **ROUTED, "attention_bias": True, "use_qk_norm": True}),
    "glm4-moe-lite": ("Glm4MoeLite", {**ROUTED, **LATENT}),
    "ernie4.5-moe": ("Ernie4_5_Moe", ERNIE),
    "ernie4.5-moe-interval": (
        "Ernie4_5_Moe",
        {**ERNIE, "moe_layer_start_index": 0, "moe_layer_interval": 2, "tie_word_embeddings": False},
    ),
    "mimo-v2-flash": ("MiMoV2Flash", WINDOWS),
    "nemotron-h": ("NemotronH", BLOCKS),
    "nemotron-h-dense": ("NemotronH", BLOCKS | {"layers_block_type": ["mlp", "linear_attention", "full_attention"]}),
    "qwen3-next": ("Qwen3Next", {"head_dim": 32, **MOE, **SHARED, **DELTA}),
    "qwen3.5": ("Qwen3_5Text", {"head_dim": 32, **DELTA}),
    "qwen3.5-moe": ("Qwen3_5MoeText", {"head_dim": 32, **MOE, **SHARED, **DELTA}),
    "qwen3.5-vl": ("Qwen3_5", {"head_dim": 32, **DELTA}),
    "qwen3.5-moe-vl": ("Qwen3_5Moe", {"head_dim": 32, **MOE, **SHARED, **DELTA}),
}


def written_by_transformers(kind: str, fields: dict[str, Any], folder: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """The names and shapes in the checkpoint of a tiny model, and its config."""
    import transformers

    if kind in ("Qwen3_5", "Qwen3_5Moe"):
        config = getattr(transformers, f"{kind}Config")(text_config={**TINY, **fields}, vision_config=VISION)
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    else:
        config = getattr(transformers, f"{kind}Config")(**{**TINY, **fields})
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    text = {name: size for name, size in shapes.items() if not name.startswith("model.visual.")}
    # transformers omits MTP layers, but its config classes of DeepSeek and GLM have one by default.
    return text, {**model.config.to_dict(), "num_nextn_predict_layers": 0}


@pytest.mark.parametrize("case", CASES)
def test_names_and_shapes_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    on_disk, config = written_by_transformers(*CASES[case], tmp_path)
    shape = shape_of(config)
    assert case.startswith(shape.family)
    assert tensor_shapes(shape) == on_disk
    assert count_parameters(shape)["total"] == sum(map(prod, on_disk.values()))
    assert count_parameters(shape)["mtp"] == 0


def mimo(**fields: Any) -> ModelShape:
    return shape_of({**TINY, "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1, **fields})


def test_mimo_is_qwen2_with_mtp_layers() -> None:
    trunk = shape_of({**TINY, "architectures": ["Qwen2ForCausalLM"]})
    shape = mimo(num_nextn_predict_layers=2)
    tensors = tensor_shapes(shape)
    target = {name: size for name, size in tensors.items() if section_of(name, shape) == "target"}
    assert target == tensor_shapes(trunk)
    draft = [name for name in tensors if name not in target]
    assert draft and all(name.startswith(("model.mtp_layers.0.", "model.mtp_layers.1.")) for name in draft)
    assert tensors["model.mtp_layers.1.input_proj.weight"] == (64, 128)
    assert tensors["model.mtp_layers.0.self_attn.q_proj.bias"] == (64,)


def test_final_norm_and_head_of_the_trunk_are_in_the_target_section() -> None:
    shape = mimo()
    assert section_of("lm_head.weight", shape) == "target"
    assert section_of("model.norm.weight", shape) == "target"


def test_deepseek_mtp_layers_follow_the_decoder_layers_and_copy_embedding_and_head() -> None:
    shape = shape_of({**TINY, **ROUTED, **LATENT, "architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 1})
    assert section_of("model.layers.2.input_layernorm.weight", shape) == "target"
    assert section_of("model.layers.3.input_layernorm.weight", shape) == "draft"
    assert section_of("model.layers.31.input_layernorm.weight", shape) == "draft"
    assert aliases(shape) == {
        "model.layers.3.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.3.shared_head.head.weight": "lm_head.weight",
    }
    assert set(aliases(shape)) <= set(tensor_shapes(shape))
    # MTP layers have experts even if the first decoder layers are dense.
    assert "model.layers.3.mlp.experts.0.gate_proj.weight" in tensor_shapes(shape)


def test_a_tied_head_is_an_alias_and_not_stored() -> None:
    shape = mimo(tie_word_embeddings=True)
    assert aliases(shape) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in tensor_shapes(shape)
    assert count_parameters(shape)["total"] == count_parameters(mimo())["total"] - 128 * 64


def test_qwen_vl_checkpoints_have_a_prefix_for_the_text_model_but_not_for_mtp() -> None:
    text = {**TINY, **DELTA, "head_dim": 32, "mtp_num_hidden_layers": 1}
    shape = shape_of({"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text})
    tensors = tensor_shapes(shape)
    assert tensors["model.language_model.layers.1.self_attn.q_proj.weight"] == (2 * 4 * 32, 64)
    assert tensors["mtp.fc.weight"] == (64, 128)
    assert section_of("mtp.fc.weight", shape) == "draft"
    assert section_of("model.language_model.norm.weight", shape) == "target"


def bridge_source(module: str) -> str:
    """The text of a Megatron-Bridge module, read without importing Megatron."""
    spec = importlib.util.find_spec("megatron")
    assert spec is not None and spec.submodule_search_locations
    paths = (Path(root) / "bridge" / "models" / module for root in spec.submodule_search_locations)
    return next(path for path in paths if path.is_file()).read_text()


@pytest.mark.parametrize(
    ("architecture", "fields", "module"),
    [
        ("MiMoForCausalLM", {}, "mimo/mimo_bridge.py"),
        ("Qwen3NextForCausalLM", {**MOE, **SHARED, **DELTA, "head_dim": 32}, "qwen/qwen3_next_bridge.py"),
        ("Qwen3_5ForCausalLM", {**DELTA, "head_dim": 32}, "qwen/qwen35_bridge.py"),
    ],
)
def test_mtp_names_are_mapped_by_megatron_bridge(architecture: str, fields: dict[str, Any], module: str) -> None:
    shape = shape_of({**TINY, **fields, "architectures": [architecture], "num_nextn_predict_layers": 1})
    source = bridge_source(module)
    draft = [name for name in tensor_shapes(shape) if section_of(name, shape) == "draft"]
    assert draft
    for name in draft:
        starred = name.replace("layers.0.", "layers.*.").replace("experts.0.", "experts.*.")
        if ".experts." not in name or ".experts.0." in name:
            assert f'"{name}"' in source or f'"{starred}"' in source, name


def test_parameter_counts_of_mimo_7b() -> None:
    counts = count_parameters(shape_of(hub_config("XiaomiMiMo/MiMo-7B-RL")))
    # 7.83 B are the parameters of a model built with this shape; the published 7 B count only the trunk.
    assert counts == {"total": 7_833_409_536, "mtp": 210_790_400, "embedding": 621_281_280, "head": 621_281_280, "experts": 0}


def vision_parameters(vision: dict[str, Any]) -> int:
    """Parameters of Qwen3.5's vision tower: patch and position embeddings, blocks, and the merger."""
    size, ffn, out = (int(vision[key]) for key in ("hidden_size", "intermediate_size", "out_hidden_size"))
    patch = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    merged = size * vision["spatial_merge_size"] ** 2
    block = 4 * size + (size + 1) * 3 * size + (size + 1) * size + (size + 1) * ffn + (ffn + 1) * size
    merger = 2 * size + (merged + 1) * merged + (merged + 1) * out
    return int((patch + 1) * size + vision["num_position_embeddings"] * size + vision["depth"] * block + merger)


PUBLISHED = {
    "Qwen/Qwen3.6-27B": 27_781_427_952,
    "Qwen/Qwen3.6-35B-A3B": 35_951_822_704,
    "Qwen/Qwen3.8-27B": 27_781_427_952,
    "Qwen/Qwen3.8-2.4T-A95B": 2_446_182_725_504,
    "zai-org/GLM-4.5-Air": 110_468_824_832,
    "zai-org/GLM-4.5": 358_337_791_296,
    "zai-org/GLM-4.6": 358_337_791_296,
    "zai-org/GLM-4.7": 358_337_791_296,
    "zai-org/GLM-4.7-Flash": 31_221_488_576,
}
"""Elements of all tensors of the published folders, from the safetensors metadata on the hub: with vision tower, MTP layers and copies."""


@pytest.mark.parametrize("hub_id", PUBLISHED)
def test_parameters_of_a_published_config_equal_those_of_its_folder(hub_id: str) -> None:
    config = hub_config(hub_id)
    shape = shape_of(config)
    sizes = {name: prod(size) for name, size in tensor_shapes(replace(shape, moe=shape.moe and replace(shape.moe, experts=1))).items()}
    copies = sum(sizes[name] for name in aliases(shape) if name in sizes)
    vision: Any = config.get("vision_config")
    assert shape.mtp_layers == 1
    assert count_parameters(shape)["total"] + copies + (vision_parameters(vision) if vision else 0) == PUBLISHED[hub_id]


def test_parameters_of_ernie_equal_those_that_transformers_and_vllm_allocate() -> None:
    """The published sizes: the trunk of transformers, and a Llama layer, two norms and a projection for vLLM's drafter."""
    import torch
    import transformers
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = hub_config("baidu/ERNIE-4.5-21B-A3B-PT")
    counts = count_parameters(shape_of(config))
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    with torch.device("meta"):
        trunk = transformers.AutoModelForCausalLM.from_config(transformers.Ernie4_5_MoeConfig(**config))
        layer = LlamaDecoderLayer(transformers.LlamaConfig(**{name: config[name] for name in names}), 0)
    assert counts["total"] - counts["mtp"] == sum(parameter.numel() for parameter in trunk.parameters()) == 21_825_437_888
    hidden = trunk.config.hidden_size
    assert counts["mtp"] == sum(parameter.numel() for parameter in layer.parameters()) + 2 * hidden + 2 * hidden**2


def test_parameters_of_mimo_v2_flash_equal_those_that_transformers_and_vllm_allocate() -> None:
    """The published sizes: the trunk of transformers; and for each of vLLM's MTP layers a window layer with a dense MLP, three norms and a
    projection. Xiaomi states 309B."""
    import torch
    import transformers
    from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import MiMoV2FlashDecoderLayer

    fields = hub_config("XiaomiMiMo/MiMo-V2-Flash")
    counts = count_parameters(shape_of(fields))
    with torch.device("meta"):
        config = transformers.MiMoV2FlashConfig(**fields)
        trunk = transformers.AutoModelForCausalLM.from_config(config)
        config.mlp_layer_types = ["dense"] * 48
        layer = MiMoV2FlashDecoderLayer(config, config.layer_types.index("sliding_attention"))
    # The router's bias is a buffer of transformers.
    biases = sum(buffer.numel() for name, buffer in trunk.named_buffers() if name.endswith("e_score_correction_bias"))
    trunk_size = sum(parameter.numel() for parameter in trunk.parameters()) + biases
    assert counts["total"] - counts["mtp"] == trunk_size
    assert round(trunk_size / 1e9) == 309
    hidden = config.hidden_size
    assert counts["mtp"] == 3 * (sum(parameter.numel() for parameter in layer.parameters()) + 3 * hidden + 2 * hidden**2)


def test_parameters_of_mistral_equal_those_of_its_folder() -> None:
    shape = shape_of(hub_config("mistralai/Mistral-7B-v0.3"))
    assert count_parameters(shape)["total"] == 7_248_023_552 and shape.mtp_layers == 0


def test_parameters_of_nemotron_equal_those_of_published_copies() -> None:
    """llama.cpp reads the first number from Nemotron 3 Nano's weights. Lightning's folder has 65.8 GB in bf16, and its MTP layer the sizes
    of the trunk's attention and experts."""
    names = [f"nvidia/NVIDIA-Nemotron-{name}-30B-A3B-BF16" for name in ("3-Nano", "3.5-Lightning")]
    nano, lightning = (shape_of(hub_config(name)) for name in names)
    assert count_parameters(nano)["total"] == 31_577_940_288 and nano.mtp_layers == 0
    counts = count_parameters(lightning)
    assert counts["total"] - counts["mtp"] == 31_577_940_288 and round(2 * counts["total"] / 1e9, 1) == 65.8
    tensors, hidden = tensor_shapes(lightning), lightning.hidden
    kinds = (lightning.layer_kinds.index("full_attention"), lightning.layer_kinds.index("none"))
    layers = sum(prod(size) for name, size in tensors.items() if name.startswith(tuple(f"backbone.layers.{kind}." for kind in kinds)))
    assert counts["mtp"] == layers + 3 * hidden + 2 * hidden**2


def test_older_patterns_name_the_same_layers_as_lists() -> None:
    fields = {**TINY, **BLOCKS, "architectures": ["NemotronHForCausalLM"], "num_hidden_layers": 4, "num_nextn_predict_layers": 1}
    older = {name: value for name, value in fields.items() if name != "layers_block_type"}
    shape = shape_of(fields)
    assert shape_of({**older, "hybrid_override_pattern": "ME*-", "mtp_hybrid_override_pattern": "*E"}) == shape
    assert (
        shape_of({**fields, "layers_block_type": ["mamba", "moe", "attention", "mlp"], "mtp_layers_block_type": ["attention", "moe"]})
        == shape
    )
    assert [shape.mlp_of(layer) for layer in range(4)] == ["none", "sparse", "none", "dense"]
    assert section_of("mtp.layers.1.mixer.experts.3.up_proj.weight", shape) == "draft"
    assert section_of("backbone.layers.1.mixer.experts.3.up_proj.weight", shape) == "target"


@pytest.mark.parametrize("experts", [1, 2, 3, 7])
def test_parameter_counts_are_those_of_all_tensors(experts: int) -> None:
    shape = shape_of({**TINY, **ROUTED, **LATENT, "architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 1})
    assert shape.moe is not None
    shape = replace(shape, moe=replace(shape.moe, experts=experts))
    same = aliases(shape)
    sizes = {name: prod(size) for name, size in tensor_shapes(shape).items() if name not in same}
    counts = count_parameters(shape)
    assert counts["total"] == sum(sizes.values())
    assert counts["mtp"] == sum(size for name, size in sizes.items() if name.startswith("model.layers.3."))
    assert counts["experts"] == sum(size for name, size in sizes.items() if ".mlp.experts." in name)
