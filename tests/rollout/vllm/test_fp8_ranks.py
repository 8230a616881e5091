"""FP8 weights on an engine of two ranks: after syncs in many buckets each rank has what a new engine loads from the exported folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtpctl.families.quantization import find_split_block, select_fp8_names
from mtpctl.rollout.vllm.client import VllmClient
from mtpctl.rollout.vllm.engine import VllmEngine
from tests.fakes.engines import START_S, Loop, cpu_settings
from tests.fakes.fp8_models import Model, answer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SIZES: dict[str, int] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
CASES: dict[str, dict[str, int]] = {
    "qwen3-moe": SIZES | {"moe_intermediate_size": 256},
    "glm4-moe": SIZES | {"moe_intermediate_size": 256},
    # One head of keys and values, which both ranks have.
    "qwen3": SIZES | {"num_key_value_heads": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_weights_of_each_rank_after_syncs_equal_those_of_a_new_engine(
    case: str, run: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # The core forks its ranks.
    model = Model(tmp_path, case, **CASES[case])
    assert find_split_block(model.shape, select_fp8_names(model.shape), 2) is None

    def start(folder: Path, **rollout: Any) -> VllmEngine:
        drafts = int(model.shape.mtp_layers > 0)
        return run(
            VllmEngine.start(cpu_settings(folder, k=drafts, precision="bf16", context=64, tp=2, max_in_flight=8, **rollout)), START_S
        )

    def live(engine: VllmEngine) -> list[dict[str, str]]:
        return run(VllmClient(engine._llm).rpc("mtpctl_live_sums"))  # type: ignore[arg-type]

    engine = start(tmp_path / "hf", quantization="fp8")
    try:
        loaded = live(engine)
        publisher = model.publisher(delta=True)
        for version in (1, 2, 3):
            manifest = model.publish(publisher, version)
            assert run(engine.update(manifest, verify=True)).verified
        after, sample = live(engine), answer(engine, run)
    finally:
        run(engine.shutdown())
    fresh = start(model.exported(3))
    try:
        expected, again = live(fresh), answer(fresh, run)
    finally:
        run(fresh.shutdown())
    assert after == expected and after[0] != after[1] and after[0] != loaded[0]
    assert (again.response_ids.tolist(), again.behaviour_logprobs) == (sample.response_ids.tolist(), sample.behaviour_logprobs)
    assert torch.tensor(again.behaviour_logprobs).isfinite().all()
