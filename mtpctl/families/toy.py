"""A model small enough to be made in a moment and to run on a CPU."""

from __future__ import annotations

from typing import Any

_TOY: dict[str, Any] = {
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


def toy_config(**changes: Any) -> dict[str, Any]:
    """The config.json fields of a MiMo model of two layers and one MTP layer; how large vocabulary and context are, `changes` say.

    `model_type` is one that every vLLM reads without a stand-in.
    """
    return {**_TOY, **changes}
