"""Configs of a few hub models, so that plans and models with random weights need no download."""

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

HUB_CONFIGS: dict[str, dict[str, object]] = {
    "XiaomiMiMo/MiMo-7B-Base": _MIMO_7B,
    "XiaomiMiMo/MiMo-7B-SFT": _MIMO_7B,
    "XiaomiMiMo/MiMo-7B-RL": _MIMO_7B,
}


def hub_config(hub_id: str) -> dict[str, object]:
    """The config.json fields of a hub model in `HUB_CONFIGS`. Raises UserError for another, naming those."""
    if hub_id not in HUB_CONFIGS:
        raise UserError(f"the sizes of {hub_id} are not known without a download; known are {', '.join(HUB_CONFIGS)}")
    return deepcopy(HUB_CONFIGS[hub_id])
