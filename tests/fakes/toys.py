"""One toy of every family that carries an MTP head: config.json fields that the trainer, vLLM and transformers all take.

Sizes are odd where the kernels of a CPU let them be: widths that are no power of two, three heads, a prime vocabulary, counts of
experts that nothing divides. vLLM on a CPU wants heads of 32 or a few wider ones, and linear attention of 64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 104,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 331,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "shared_expert_intermediate_size": 40,
}
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "partial_rotary_factor": 0.25,
}
_GROUPED: dict[str, Any] = {
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}

MIMO: dict[str, Any] = {
    **SIZES,
    "architectures": ["MiMoForCausalLM"],
    "model_type": "qwen2",
    "attention_bias": True,
    "num_nextn_predict_layers": 1,
}
QWEN3_NEXT: dict[str, Any] = {
    **SIZES,
    **_EXPERTS,
    **_DELTA,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_nextn_predict_layers": 1,
}
QWEN3_5: dict[str, Any] = {
    **SIZES,
    **_DELTA,
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
}
QWEN3_5_MOE: dict[str, Any] = {
    **SIZES,
    **_EXPERTS,
    **_DELTA,
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "mtp_num_hidden_layers": 1,
}
DEEPSEEK_V3: dict[str, Any] = {
    **{name: value for name, value in SIZES.items() if name != "head_dim"},
    **_GROUPED,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 3,
    "q_lora_rank": 24,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
GLM4_MOE: dict[str, Any] = {
    **SIZES,
    **_GROUPED,
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
}
GLM4_MOE_LITE: dict[str, Any] = {
    **{name: value for name, value in DEEPSEEK_V3.items() if name != "scoring_func"},
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
}
MIMO_V2_FLASH: dict[str, Any] = {
    **{name: value for name, value in SIZES.items() if name != "rms_norm_eps"},
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "num_hidden_layers": 3,
    "v_head_dim": 32,
    "swa_num_attention_heads": 3,
    "swa_num_key_value_heads": 3,
    "swa_head_dim": 32,
    "swa_v_head_dim": 32,
    "hybrid_layer_pattern": [0, 1, 1],
    "sliding_window": 7,
    "sliding_window_size": 7,
    "attention_chunk_size": 7,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "attention_value_scale": 0.707,
    "swa_rope_theta": 1000.0,
    "partial_rotary_factor": 0.334,
    "layernorm_epsilon": 1e-6,
    "moe_layer_freq": [0, 1, 1],
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "n_group": 2,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": None,
    "n_shared_experts": None,
    "num_nextn_predict_layers": 1,
}
NARROW_VALUES = {"v_head_dim": 20, "swa_v_head_dim": 20}
"""Fields of a MiMo-V2-Flash whose values are narrower than keys, as in the published one. Stock vLLM does not serve it on a CPU."""
ERNIE4_5_MOE: dict[str, Any] = {
    **SIZES,
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "num_hidden_layers": 3,
    "moe_num_experts": 5,
    "moe_k": 2,
    "moe_num_shared_experts": 2,
    "moe_intermediate_size": 40,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 2,
    "moe_layer_interval": 1,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": True,
}
NEMOTRON_H: dict[str, Any] = {
    **{name: value for name, value in SIZES.items() if name not in ("rms_norm_eps", "rope_theta", "hidden_act", "num_hidden_layers")},
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "ME*-ME",
    "mtp_hybrid_override_pattern": "*E",
    "num_hidden_layers": 6,
    "layer_norm_epsilon": 1e-5,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 3,
    "ssm_state_size": 24,
    "conv_kernel": 4,
    "chunk_size": 8,
    "use_conv_bias": True,
    "use_bias": False,
    "mamba_hidden_act": "silu",
    "mamba_ssm_cache_dtype": "float32",
    "mlp_hidden_act": "relu2",
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}

EAGLE3: dict[str, Any] = {
    **{name: value for name, value in SIZES.items() if name != "tie_word_embeddings"},
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "intermediate_size": 72,
    "draft_vocab_size": SIZES["vocab_size"],
    "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
}
_FOUR_LAYERS: dict[str, Any] = {**SIZES, "num_hidden_layers": 4, "attention_bias": False, "drafter": EAGLE3}
LLAMA_EAGLE3: dict[str, Any] = {**_FOUR_LAYERS, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MISTRAL_EAGLE3: dict[str, Any] = LLAMA_EAGLE3 | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
QWEN3_EAGLE3: dict[str, Any] = {**_FOUR_LAYERS, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
QWEN3_MOE_EAGLE3: dict[str, Any] = {
    **_FOUR_LAYERS,
    **{name: value for name, value in _EXPERTS.items() if not name.startswith("shared")},
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
}

DFLASH: dict[str, Any] = {
    **{name: value for name, value in SIZES.items() if name != "tie_word_embeddings"},
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "intermediate_size": 72,
    "attention_bias": False,
    "dflash_config": {"mask_token_id": 2, "target_layer_ids": [0, 1, 3]},
}
LLAMA_DFLASH: dict[str, Any] = LLAMA_EAGLE3 | {"drafter": DFLASH}
QWEN3_DFLASH: dict[str, Any] = QWEN3_EAGLE3 | {"drafter": DFLASH}
QWEN3_MOE_DFLASH: dict[str, Any] = QWEN3_MOE_EAGLE3 | {"drafter": DFLASH}

TOYS: dict[str, dict[str, Any]] = {
    "mimo": MIMO,
    "qwen3-next": QWEN3_NEXT,
    "qwen3.5": QWEN3_5,
    "qwen3.5-moe": QWEN3_5_MOE,
    "deepseek-v3": DEEPSEEK_V3,
    "glm4-moe": GLM4_MOE,
    "glm4-moe-lite": GLM4_MOE_LITE,
    "ernie4.5-moe": ERNIE4_5_MOE,
    "mimo-v2-flash": MIMO_V2_FLASH,
    "nemotron-h": NEMOTRON_H,
    "llama with EAGLE-3": LLAMA_EAGLE3,
    "mistral with EAGLE-3": MISTRAL_EAGLE3,
    "qwen3 with EAGLE-3": QWEN3_EAGLE3,
    "qwen3-moe with EAGLE-3": QWEN3_MOE_EAGLE3,
    "llama with DFlash": LLAMA_DFLASH,
    "qwen3 with DFlash": QWEN3_DFLASH,
    "qwen3-moe with DFlash": QWEN3_MOE_DFLASH,
}
"""By the names of `mtpctl.families.registry.FAMILIES`: every family with an MTP convention and no vision tower, and separate drafters
folder."""

_PUBLISHED_STATES = {"mamba_num_heads": 8, "mamba_head_dim": 64, "n_groups": 2, "ssm_state_size": 128, "chunk_size": 128}
_PUBLISHED_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 16, "qk_nope_head_dim": 128, "v_head_dim": 128}
ON_GPUS = TOYS | {
    "deepseek-v3": DEEPSEEK_V3 | _PUBLISHED_HEADS,
    "glm4-moe-lite": GLM4_MOE_LITE | _PUBLISHED_HEADS | {"qk_nope_head_dim": 192, "v_head_dim": 256},
    "nemotron-h": NEMOTRON_H | _PUBLISHED_STATES,
    "mimo-v2-flash": MIMO_V2_FLASH | {"head_dim": 192, "swa_head_dim": 192, "v_head_dim": 128, "swa_v_head_dim": 128},
}
"""The same for a GPU, where vLLM's latent attention takes the published widths of a head and 16 heads or more, values may be narrower
than keys, and Mamba-2's kernels have the published widths of heads and states."""

SERVED = [
    (family, dtype)
    for family, config in TOYS.items()
    for dtype in ("fp32", "bf16")
    if dtype == "bf16" or "linear_conv_kernel_dim" not in config
]
"""What vLLM serves on a CPU: its linear attention is computed in bf16 alone."""


def toy_folder(config: dict[str, Any], path: Path, seed: int, dtype: str) -> Path:
    """A folder of this config with everything drawn, norms and biases as well, in the types that a trainer exports."""
    import torch
    from safetensors.torch import load_file, save_file

    from mtpctl.convert.hf_folder import create_hf_folder

    create_hf_folder(config, path, seed, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for file in sorted(path.rglob("*.safetensors")):
        tensors = load_file(file)
        for name, value in tensors.items():
            if value.dim() == 1 or name.endswith("e_score_correction_bias"):
                drawn = value + 0.1 * torch.randn(value.shape, generator=generator)
                tensors[name] = drawn if name.endswith("e_score_correction_bias") else drawn.to(value.dtype)
        save_file(tensors, file, metadata={"format": "pt"})
    return path
