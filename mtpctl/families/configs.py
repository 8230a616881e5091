"""Configs of some hub models and of a toy model, so that plans and models with random weights need no download."""

from __future__ import annotations

from copy import deepcopy

from mtpctl.errors import UserError

_MIMO_7B: dict[str, object] = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151680,
    "rope_theta": 640000,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}

_QWEN: dict[str, object] = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "torch_dtype": "bfloat16",
}

_QWEN3_30B_A3B: dict[str, object] = {
    **_QWEN,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}

_HYBRID: dict[str, object] = {
    **_QWEN,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "rope_theta": 10000000,
    "partial_rotary_factor": 0.25,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}

_QWEN3_NEXT_80B_A3B: dict[str, object] = {
    **_HYBRID,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "intermediate_size": 5120,
    "vocab_size": 151936,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_nextn_predict_layers": 1,
}

_QWEN3_5_35B_A3B: dict[str, object] = {
    **_HYBRID,
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "num_hidden_layers": 40,
    "vocab_size": 248320,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "mtp_num_hidden_layers": 1,
}

_QWEN_VISION: dict[str, object] = {
    "depth": 27,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "deepstack_visual_indexes": [],
}

_QWEN_MULTIMODAL: dict[str, object] = {
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
    "tie_word_embeddings": False,
}

# Qwen3.6 and Qwen3.8 have the architectures of Qwen3.5.
_QWEN3_6_27B: dict[str, object] = {
    **_QWEN_MULTIMODAL,
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "full_attention_interval": 4,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "attn_output_gate": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "output_gate_type": "swish",
        "initializer_range": 0.02,
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rms_norm_eps": 1e-6,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        "tie_word_embeddings": False,
        "vocab_size": 248320,
        "bos_token_id": 248044,
        "eos_token_id": 248044,
        "dtype": "bfloat16",
    },
    "vision_config": {**_QWEN_VISION, "model_type": "qwen3_5", "out_hidden_size": 5120},
}

_QWEN3_6_35B_A3B: dict[str, object] = {
    **_QWEN_MULTIMODAL,
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {
        **{name: value for name, value in _QWEN3_5_35B_A3B.items() if name != "architectures"},
        "mamba_ssm_dtype": "float32",
        "eos_token_id": 248044,
    },
    "vision_config": {**_QWEN_VISION, "model_type": "qwen3_5_moe", "out_hidden_size": 2048},
}

_QWEN3_8_2_4T_A95B: dict[str, object] = {
    **_HYBRID,
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 8192,
    "num_hidden_layers": 92,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "linear_num_value_heads": 128,
    "mamba_ssm_dtype": "float32",
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 2048,
    "shared_expert_intermediate_size": 2048,
    "mtp_num_hidden_layers": 1,
    "vocab_size": 248320,
    "eos_token_id": 248044,
}

_GLM_4_5_AIR: dict[str, object] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "hidden_size": 4096,
    "num_hidden_layers": 46,
    "intermediate_size": 10944,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151552,
    "rope_theta": 1000000,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "attention_dropout": 0.0,
    "use_qk_norm": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 1,
    "eos_token_id": [151329, 151336, 151338],
    "pad_token_id": 151329,
    "torch_dtype": "bfloat16",
}

_GLM_4_5: dict[str, object] = {
    **_GLM_4_5_AIR,
    "hidden_size": 5120,
    "num_hidden_layers": 92,
    "intermediate_size": 12288,
    "n_routed_experts": 160,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}

_GLM_4_6: dict[str, object] = {**_GLM_4_5, "max_position_embeddings": 202752}

_GLM_4_7_FLASH: dict[str, object] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "hidden_size": 2048,
    "num_hidden_layers": 47,
    "intermediate_size": 10240,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "vocab_size": 154880,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "max_position_embeddings": 202752,
    "tie_word_embeddings": False,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
    "num_nextn_predict_layers": 1,
    "eos_token_id": [154820, 154827, 154829],
    "pad_token_id": 154820,
    "torch_dtype": "bfloat16",
}

_DEEPSEEK_V3: dict[str, object] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
    "vocab_size": 129280,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
}

HUB_CONFIGS: dict[str, dict[str, object]] = {
    "XiaomiMiMo/MiMo-7B-Base": _MIMO_7B,
    "XiaomiMiMo/MiMo-7B-SFT": _MIMO_7B,
    "XiaomiMiMo/MiMo-7B-RL": _MIMO_7B,
    "Qwen/Qwen3-30B-A3B": _QWEN3_30B_A3B,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": _QWEN3_NEXT_80B_A3B,
    "Qwen/Qwen3.5-35B-A3B": _QWEN3_5_35B_A3B,
    "Qwen/Qwen3.6-27B": _QWEN3_6_27B,
    "Qwen/Qwen3.6-35B-A3B": _QWEN3_6_35B_A3B,
    "Qwen/Qwen3.8-27B": _QWEN3_6_27B,
    "Qwen/Qwen3.8-2.4T-A95B": _QWEN3_8_2_4T_A95B,
    "zai-org/GLM-4.5-Air": _GLM_4_5_AIR,
    "zai-org/GLM-4.5": _GLM_4_5,
    "zai-org/GLM-4.6": _GLM_4_6,
    "zai-org/GLM-4.7": _GLM_4_6,
    "zai-org/GLM-4.7-Flash": _GLM_4_7_FLASH,
    "deepseek-ai/DeepSeek-V3": _DEEPSEEK_V3,
}


def hub_config(hub_id: str) -> dict[str, object]:
    """The config.json fields of a hub model. Raises UserError for a model that is not in `HUB_CONFIGS`."""
    if hub_id not in HUB_CONFIGS:
        raise UserError(f"the sizes of {hub_id} are not known without a download; known are {', '.join(HUB_CONFIGS)}")
    return deepcopy(HUB_CONFIGS[hub_id])


_TOY: dict[str, object] = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 640000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def toy_config(**changes: object) -> dict[str, object]:
    """The config.json fields of a MiMo model with two layers and one MTP layer, updated with `changes`, such as vocabulary and context.

    Its `model_type` is one that vLLM reads without `mtpctl.compat.mimo_config`.
    """
    return {**_TOY, **changes}
