"""Configs of Qwen models on the hub: Qwen3, Qwen3-Next, Qwen3.5, Qwen3.6 and Qwen3.8."""

from __future__ import annotations

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

QWEN3_30B_A3B: dict[str, object] = {
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

QWEN3_NEXT_80B_A3B: dict[str, object] = {
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

QWEN3_5_35B_A3B: dict[str, object] = {
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
QWEN3_6_27B: dict[str, object] = {
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

QWEN3_6_35B_A3B: dict[str, object] = {
    **_QWEN_MULTIMODAL,
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {
        **{name: value for name, value in QWEN3_5_35B_A3B.items() if name != "architectures"},
        "mamba_ssm_dtype": "float32",
        "eos_token_id": 248044,
    },
    "vision_config": {**_QWEN_VISION, "model_type": "qwen3_5_moe", "out_hidden_size": 2048},
}

QWEN3_8_2_4T_A95B: dict[str, object] = {
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
