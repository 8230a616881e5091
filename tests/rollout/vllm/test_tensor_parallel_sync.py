"""MoE weights on an engine of two ranks are the same whether a version arrives in one bucket or in many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from mtpctl.families.reading import shape_of
from mtpctl.families.tensors import section_of
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import VersionStore
from tests.fakes.engines import START_S, Loop, cpu_settings
from tests.fakes.toys import GLM4_MOE, NEMOTRON_H, QWEN3_5_MOE, toy_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EVEN: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "vocab_size": 384,
}
MODELS = {
    "glm4-moe": (GLM4_MOE | EVEN, "fp32"),
    "qwen3.5-moe": (
        QWEN3_5_MOE | EVEN | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "shared_expert_intermediate_size": 64},
        "bf16",
    ),
    "nemotron-h": (NEMOTRON_H | EVEN | {"mamba_num_heads": 4, "n_groups": 2, "moe_shared_expert_intermediate_size": 64}, "fp32"),
}
"""What two ranks can share."""


@pytest.mark.parametrize("family", MODELS)
def test_two_ranks_serve_the_same_weights_for_any_bucket_size(
    family: str, run: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # The core forks its ranks.
    config, dtype = MODELS[family]
    folders = [toy_folder(config, tmp_path / str(seed), seed, dtype) for seed in (0, 1)]
    tensors = [load_file(folder / "model.safetensors") for folder in folders]
    shape = shape_of(config)
    engine = run(VllmEngine.start(cpu_settings(folders[0], tp=2, dtype=dtype, max_in_flight=8)), START_S)

    def answer() -> tuple[list[int], list[float]]:
        sample = run(engine.generate(GenerationRequest(Sample("p", "g", [5, 6, 7, 8]), 24, temperature=0.0)))
        return sample.response_ids.tolist(), sample.behaviour_logprobs.tolist()

    try:
        loaded = answer()
        store = VersionStore(tmp_path / "store")
        for seed, bucket_bytes in ((1, 1 << 30), (0, 1 << 16), (1, 1 << 16), (0, 1 << 30)):
            publisher = Publisher(store, bucket_bytes=bucket_bytes, section_of=lambda name: section_of(name, shape))
            manifest = publisher.publish(tensors[seed].items(), engine.version + 1, checksums=True)
            assert (len(manifest.sections["target"].buckets) > 5) == (bucket_bytes == 1 << 16)
            assert run(engine.update(manifest, verify=True)).verified == len(tensors[seed])
            assert (answer() == loaded) == (seed == 0)
    finally:
        run(engine.shutdown())
