"""An MoE adapter received in buckets smaller than one of its matrices is served like merged weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from mtpctl.recipe.train import LoraConfig
from mtpctl.rollout.vllm.engine import VllmEngine
from tests.fakes import adapters
from tests.fakes.engines import START_S, Loop, cpu_settings, gpu_settings
from tests.fakes.hybrid import answers, mismatch
from tests.fakes.toys import toy_folder
from tests.fakes.vllm_models import MODELS

pytestmark = pytest.mark.timeout(600)

CONFIG = MODELS["qwen3-moe"][0]
ATTENTION, EXPERTS = ("linear_qkv", "linear_proj"), ("linear_fc1", "linear_fc2")
BUCKET = 256
"""Bytes, of the 1,024 or more of a matrix A [4, 96 or more] in bf16 or its B."""
CASES = [
    pytest.param("cpu", False, marks=pytest.mark.slow, id="attention-cpu"),
    # vLLM has no adapters for experts on a CPU.
    pytest.param("cuda", True, marks=pytest.mark.gpu, id="attention-and-experts-cuda"),
]


@pytest.mark.parametrize(("device", "experts"), CASES)
def test_adapter_in_small_buckets_is_served_as_merged_weights(device: str, experts: bool, run: Loop, tmp_path: Path) -> None:
    base, merged = toy_folder(CONFIG, tmp_path / "base", 0, "bf16"), tmp_path / "merged"
    tensors = load_file(base / "model.safetensors")
    delta = {name: tensor for name, tensor in adapters.adapter(tensors, 1).items() if experts or ".mlp." not in name}
    shutil.copytree(base, merged)
    save_file(adapters.merged(tensors, delta), merged / "model.safetensors", metadata={"format": "pt"})
    lora = LoraConfig(rank=adapters.RANK, alpha=adapters.ALPHA, targets=[*ATTENTION, *(EXPERTS if experts else ())])
    settings = gpu_settings(base, k=0, adapter=lora) if device == "cuda" else cpu_settings(base, k=0, precision="bf16", adapter=lora)
    publisher = adapters.publisher(tmp_path / "store", bucket_bytes=BUCKET, sections=("adapter",))
    manifest = publisher.publish(delta.items(), 1, checksums=True)
    assert len(manifest.sections["adapter"].buckets) > len(delta), "every matrix is cut"
    prompts = [[3 + (7 * index + place) % 300 for place in range(16)] for index in range(16)]
    engine = run(VllmEngine.start(settings), START_S)
    try:
        plain = run(answers(engine, prompts, 64))
        assert run(engine.update(manifest, verify=True)).verified == len(delta)
        adapted = run(answers(engine, prompts, 64))
    finally:
        run(engine.shutdown())
    limit = 2 * mismatch(base, plain, tmp_path / "plain.json")
    assert mismatch(merged, adapted, tmp_path / "adapted.json") < limit < mismatch(base, adapted, tmp_path / "other.json")
