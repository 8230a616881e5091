"""Seeded requests outlive steps that hold a part of their tokens: alone with the mend."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.protocol import EngineDead
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.rollout.vllm.patches import seeds, version
from mtpctl.rollout.vllm.settings import VllmSettings
from mtpctl.samples import GenerationRequest, Sample
from tests.fakes.engine_checkpoints import random_tensors, tiny_config, write_checkpoint
from tests.fakes.engines import Loop, cpu_settings
from tests.fakes.engines import run as run
from tests.fakes.engines import start_engine as start_engine

CONFIG = tiny_config()
REQUESTS = 8


def seeded(index: int) -> GenerationRequest:
    return GenerationRequest(Sample(f"p{index}", "g", [3 + index] * 20), 40, seed=index)


async def together(engine: VllmEngine, pauses: int = 0) -> list[list[int]]:
    """Responses to requests that exceed a step's tokens when all are computed anew."""
    tasks = [asyncio.ensure_future(engine.generate(seeded(index))) for index in range(REQUESTS)]
    for _ in range(pauses):
        await asyncio.sleep(0.02)
        await engine.pause("keep")
        await engine.resume()
    return [sample.response_ids for sample in await asyncio.gather(*tasks)]


def test_a_seed_outlives_partial_prefills(
    start_engine: Callable[[VllmSettings], VllmEngine], run: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    folder = write_checkpoint(tmp_path, CONFIG, random_tensors(CONFIG, 0))
    engine = start_engine(cpu_settings(folder, k=1, max_in_flight=REQUESTS, engine_args={"max_num_batched_tokens": 32}))
    alone = [run(engine.generate(seeded(index))).response_ids for index in range(REQUESTS)]
    assert run(together(engine)) == alone, "what is thrown away takes nothing from a request's own random numbers"
    assert all(len(response) == 40 for response in run(together(engine, pauses=5)))
    monkeypatch.setattr(CPUModelRunner, "sample_tokens", getattr(CPUModelRunner.sample_tokens, seeds._MARK))
    with pytest.raises(EngineDead):
        run(together(engine))


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    monkeypatch.setattr(CPUModelRunner, "sample_tokens", lambda self: None)
    monkeypatch.setattr(version, "installed", lambda: "0.33.0")
    with pytest.raises(UpstreamMoved, match=r"patches.seeds was written for vLLM 0\.32\.0, found 0\.33\.0"):
        seeds.install()


def test_a_fault_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    monkeypatch.setattr(CPUModelRunner, "sample_tokens", lambda self: None)
    monkeypatch.setattr(seeds, "_has_offset", lambda: True)
    with pytest.raises(UpstreamMoved, match="remove the patch"):
        seeds.install()
