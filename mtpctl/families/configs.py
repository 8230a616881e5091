"""Configs of some hub models and of a toy model, so that plans and models with random weights need no download."""

from __future__ import annotations

from copy import deepcopy

from mtpctl.errors import UserError
from mtpctl.families.qwen_configs import (
    QWEN3_5_35B_A3B,
    QWEN3_6_27B,
    QWEN3_6_35B_A3B,
    QWEN3_8_2_4T_A95B,
    QWEN3_30B_A3B,
    QWEN3_NEXT_80B_A3B,
)

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

_ERNIE_4_5_21B_A3B: dict[str, object] = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "hidden_size": 2560,
    "num_hidden_layers": 28,
    "intermediate_size": 12288,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 103424,
    "rope_theta": 500000,
    "rms_norm_eps": 1e-5,
    "use_bias": False,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "moe_num_experts": 64,
    "moe_k": 6,
    "moe_num_shared_experts": 2,
    "moe_intermediate_size": 1536,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 27,
    "moe_layer_interval": 1,
    "num_nextn_predict_layers": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}

HUB_CONFIGS: dict[str, dict[str, object]] = {
    "XiaomiMiMo/MiMo-7B-Base": _MIMO_7B,
    "XiaomiMiMo/MiMo-7B-SFT": _MIMO_7B,
    "XiaomiMiMo/MiMo-7B-RL": _MIMO_7B,
    "Qwen/Qwen3-30B-A3B": QWEN3_30B_A3B,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": QWEN3_NEXT_80B_A3B,
    "Qwen/Qwen3.5-35B-A3B": QWEN3_5_35B_A3B,
    "Qwen/Qwen3.6-27B": QWEN3_6_27B,
    "Qwen/Qwen3.6-35B-A3B": QWEN3_6_35B_A3B,
    "Qwen/Qwen3.8-27B": QWEN3_6_27B,
    "Qwen/Qwen3.8-2.4T-A95B": QWEN3_8_2_4T_A95B,
    "zai-org/GLM-4.5-Air": _GLM_4_5_AIR,
    "zai-org/GLM-4.5": _GLM_4_5,
    "zai-org/GLM-4.6": _GLM_4_6,
    "zai-org/GLM-4.7": _GLM_4_6,
    "zai-org/GLM-4.7-Flash": _GLM_4_7_FLASH,
    "deepseek-ai/DeepSeek-V3": _DEEPSEEK_V3,
    "baidu/ERNIE-4.5-21B-A3B-PT": _ERNIE_4_5_21B_A3B,
    "baidu/ERNIE-4.5-21B-A3B-Thinking": _ERNIE_4_5_21B_A3B,
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
