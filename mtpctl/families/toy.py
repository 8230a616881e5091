"""A model small enough to be made in a moment and to run on a CPU."""

from __future__ import annotations

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
    """The config.json fields of a MiMo model of two layers and one MTP layer, with `changes`: vocabulary and context among them.

    `model_type` is one that vLLM reads without `mtpctl.compat.mimo_config`.
    """
    return {**_TOY, **changes}
