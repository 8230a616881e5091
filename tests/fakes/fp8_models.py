"""Toy models with matrices that are large enough for FP8 blocks. Some have rows that are no multiple of a block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.fakes.convert_models import model

ATTENTION = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
EXPERTS = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 256}
DELTA = {"linear_num_key_heads": 2, "linear_key_head_dim": 64, "linear_num_value_heads": 4, "linear_value_head_dim": 32}
LATENT = {
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 36,
    "v_head_dim": 64,
    "num_key_value_heads": 4,
    "head_dim": 36,
}
WINDOWS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 96,
    "v_head_dim": 80,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 96,
    "swa_v_head_dim": 80,
}

SIZES: dict[str, dict[str, Any]] = {
    "mimo": ATTENTION | {"hidden_size": 256},
    "qwen3": ATTENTION,
    "qwen3-moe": ATTENTION | EXPERTS,
    "qwen3-next": ATTENTION | EXPERTS | DELTA,
    "qwen3.5": ATTENTION | DELTA,
    "qwen3.5-vl": ATTENTION | DELTA,
    "qwen3.5-moe": ATTENTION | EXPERTS | DELTA,
    "deepseek-v3": ATTENTION | EXPERTS | LATENT,
    "glm4-moe": ATTENTION | EXPERTS,
    "ernie4.5-moe": ATTENTION | EXPERTS,
    "mimo-v2-flash": ATTENTION | EXPERTS | WINDOWS,
    "nemotron-h": ATTENTION
    | EXPERTS
    | {"mamba_num_heads": 6, "mamba_head_dim": 64, "n_groups": 2, "ssm_state_size": 64, "moe_shared_expert_intermediate_size": 256},
}


def fp8_model(case: str, path: Path, **sizes: int) -> None:
    """Create a bf16-sized toy of the case at `path`. sizes: config fields to change."""
    model(case, path, **SIZES[case] | sizes)
