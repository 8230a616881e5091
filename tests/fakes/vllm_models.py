"""Toy models for vLLM, and the live models and parameters of an engine."""

from __future__ import annotations

from typing import Any

import torch

from mtpctl.rollout.vllm.engine import VllmEngine
from tests.fakes.toys import NARROW_VALUES, SERVED, SIZES, TOYS

MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}


MODELS: dict[str, tuple[dict[str, Any], int, str]] = {
    "qwen3-moe": ({**SIZES, **MOE, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}, 0, "fp32"),
    "tied": ({**SIZES, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True}, 0, "fp32"),
    **{f"{family} {dtype}": (TOYS[family], 1, dtype) for family, dtype in SERVED},
    "mimo-v2-flash with narrow values fp32": (TOYS["mimo-v2-flash"] | NARROW_VALUES, 1, "fp32"),
}
"""Config, draft tokens a step, precision."""


def models(engine: VllmEngine) -> dict[str, torch.nn.Module]:
    """The live models: the target, and the drafter of an engine that has one."""
    runner = engine._llm.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    drafter = getattr(runner, "drafter", None)
    return {"target": runner.get_model()} | ({} if drafter is None else {"draft": drafter.model})


def parameters(engine: VllmEngine) -> dict[str, torch.Tensor]:
    """Everything that the live models hold."""
    from mtpctl.rollout.vllm.patches.weights import plain_weight

    result = {}
    for place, model in models(engine).items():
        for name, parameter in model.named_parameters():
            path, _, leaf = name.rpartition(".")
            result[f"{place} {name}"] = plain_weight(model.get_submodule(path), leaf).clone()
            result[f"{place} {name} as it is used"] = parameter.data.clone()
        for name in ("_fused_kv_weight", "_k_norm_weights"):  # the copies of a DFlash drafter
            result |= {f"{place} {name}": getattr(module, name).clone() for module in model.modules() if hasattr(module, name)}
    return result
