"""A drafter that is always right stays so through syncs, also if they give the KV cache back or break off; one of zeros is noticed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from mtpctl.controller.weights import AcceptanceWatch
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.sync.packing import default_section
from mtpctl.sync.protocol import SyncError
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import VersionStore
from tests.fakes.engine_checkpoints import Tensors, cycle_tensors, tiny_config, write_checkpoint
from tests.fakes.engines import START_S, Loop, cpu_settings, gpu_settings

SYNCS, BREAKS_OFF = 5, 3
"""Versions, and the one of them whose first transfer breaks off within the drafter."""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_drafts_are_accepted_after_every_sync_until_the_drafter_is_zeroed(device: str, run: Loop, tmp_path: Path) -> None:
    config = tiny_config(vocab_size=128, torch_dtype="bfloat16" if device == "cuda" else "float32")

    def cycle(version: int) -> Tensors:
        tensors = cycle_tensors(config, 5 + version, 5 + version)
        return {name: tensor.bfloat16() for name, tensor in tensors.items()} if device == "cuda" else tensors

    folder = write_checkpoint(tmp_path / "model", config, cycle(0))
    settings = cpu_settings(folder) if device == "cpu" else gpu_settings(folder)
    if device == "cuda":  # The memory of a CPU's cache is never given back.
        settings = replace(settings, release_kv=True, args=settings.args | {"enable_sleep_mode": True})
    engine = run(VllmEngine.start(settings), START_S)
    store, watch = VersionStore(tmp_path / "store"), AcceptanceWatch()
    publisher = Publisher(store, bucket_bytes=1 << 16)

    async def responses() -> list[Sample]:
        # vLLM drafts without the embedding at the first position, which a longer prompt leaves behind.
        prompts = ([3, 4, 5 + index] for index in range(4))
        requests = [GenerationRequest(Sample(f"p{index}", "g", prompt), 200, temperature=0.0) for index, prompt in enumerate(prompts)]
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    def served() -> list[Sample]:
        return run(responses())

    def accepted(samples: list[Sample]) -> float:
        return sum(each.speculation.accepted for each in samples) / sum(each.speculation.drafted for each in samples)

    try:
        assert accepted(served()) == 1
        for version in range(1, SYNCS + 1):
            manifest = publisher.publish(cycle(version).items(), version, checksums=True)
            if version == BREAKS_OFF:
                last = store.folder(version) / f"draft-{len(manifest.sections['draft'].buckets) - 1:05d}.bin"
                lost = last.rename(tmp_path / "lost.bin")
                with pytest.raises(SyncError, match="of section draft cannot be read"):
                    run(engine.update(manifest))
                assert (accepted(served()), engine.version) == (1, version - 1)
                lost.rename(last)
            run(engine.update(manifest, verify=True))
            watch.begin_version(version)
            samples = served()
            assert accepted(samples) == 1 and not any(watch.observe(sample) for sample in samples)
        zeros = {name: tensor.zero_() if default_section(name) == "draft" else tensor for name, tensor in cycle(SYNCS).items()}
        run(engine.update(publisher.publish(zeros.items(), SYNCS + 1, checksums=True), verify=True))
        watch.begin_version(SYNCS + 1)
        samples = served()
        assert accepted(samples) < 0.1 and any(watch.observe(sample) for sample in samples)
    finally:
        run(engine.shutdown())
