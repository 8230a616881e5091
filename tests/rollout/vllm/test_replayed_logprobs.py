"""In bf16, at equal weights, the trainer's log-probs of a mixture of experts are under routes as near the engine's as a dense model's."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtpctl.families.reading import shape_of
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.routes import RouteShape
from mtpctl.samples import GenerationRequest, Sample
from tests.fakes.engines import Loop, cpu_settings
from tests.fakes.toys import GLM4_MOE, SIZES, toy_folder

pytestmark = pytest.mark.slow
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "initializer_range": 0.08,
}
EXPERTS: dict[str, Any] = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "norm_topk_prob": True}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {**SIZES, **WIDE, "intermediate_size": 512, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen3-moe": {
        **SIZES,
        **WIDE,
        **EXPERTS,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "glm4-moe": {
        **GLM4_MOE,
        **WIDE,
        "intermediate_size": 512,
        "n_routed_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "n_group": 1,
        "routed_scaling_factor": 1.0,
    },
}


def apart(name: str, root: Path, run: Loop) -> dict[str, dict[str, float]]:
    """What `tests.fakes.scored` finds for 1,600 tokens that an engine sampled."""
    config = MODELS[name]
    folder, routes = toy_folder(config, root / name, 0, "bf16"), RouteShape.of(shape_of(config))
    draw = np.random.default_rng(1)
    requested = [GenerationRequest(Sample(f"p{i}", "g", draw.integers(3, 250, 16).tolist()), 100, seed=i) for i in range(16)]
    settings = cpu_settings(folder, k=shape_of(config).mtp_layers, dtype="bf16", routes=routes.layers if routes else ())

    async def generate() -> list[Sample]:
        engine = await VllmEngine.start(settings)
        try:
            return await asyncio.gather(*(engine.generate(each) for each in requested))
        finally:
            await engine.shutdown()

    file = root / f"{name}.json"
    file.write_text(json.dumps([sample.to_dict() for sample in run(generate(), 300)]))
    command = [sys.executable, "-W", "ignore", "-m", "tests.fakes.scored", str(folder), str(file)]
    message = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    result: dict[str, dict[str, float]] = json.loads(message.splitlines()[-1])
    print(name, json.dumps(result))
    return result


@pytest.fixture(scope="module")
def dense(run: Loop, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    return apart("dense", tmp_path_factory.mktemp("dense"), run)["own"]


@pytest.mark.parametrize("name", ["qwen3-moe", "glm4-moe"])
def test_under_routes_experts_differ_as_little_as_a_dense_model(name: str, dense: dict[str, float], run: Loop, tmp_path: Path) -> None:
    result = apart(name, tmp_path, run)
    assert result["own"]["agreement"] < 1.0, "some experts were flipped"
    assert result["replayed"]["mean"] < result["own"]["mean"]
    assert result["replayed"]["mean"] < 1.3 * dense["mean"]
