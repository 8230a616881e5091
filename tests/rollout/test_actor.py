"""vLLM in Ray actors: one that is killed is replaced, and takes the current weights before it serves."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from mtpctl.rollout.actor import RayReplica, RolloutActor, start_replica
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import VersionStore
from tests.fakes.engine_checkpoints import random_tensors, tiny_config, write_checkpoint
from tests.fakes.engines import cpu_settings

pytestmark = pytest.mark.chaos
CONFIG = tiny_config()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


async def stream(count: int, tokens: int) -> AsyncIterator[GenerationRequest]:
    for index in range(count):
        yield GenerationRequest(Sample(f"p{index}", "g", [5, 6, index]), tokens)


class ChecksumActor(RolloutActor):
    """An actor that also returns the checksums of its live weights."""

    async def checksums(self) -> dict[str, str]:
        return await self._engine.checksums()


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("cluster")
def test_a_killed_actor_is_replaced_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpctl.rollout.actor.RolloutActor", ChecksumActor)
    folder = write_checkpoint(tmp_path / "model", CONFIG, random_tensors(CONFIG, 0))
    store = VersionStore(tmp_path / "store")
    publisher = Publisher(store, bucket_bytes=1 << 30)
    started: list[RayReplica] = []

    async def start(index: int) -> RayReplica:
        started.append(await start_replica(cpu_settings(folder), name=f"rollout-{index}", options={"num_cpus": 1}))
        return started[-1]

    async def drive() -> tuple[list[Sample], list[Any], dict[str, str]]:
        pool = await ReplicaPool.start(start, 2, store=store, max_in_flight=16)
        await pool.update(publisher.publish(random_tensors(CONFIG, 1).items(), 1, checksums=True), verify=True)
        victim = await started[0].pid()

        async def kill() -> None:
            await asyncio.sleep(0.5)
            os.kill(victim, signal.SIGKILL)

        killer = asyncio.ensure_future(kill())
        samples = [sample async for sample in pool.generate(stream(60, 150))]
        await killer
        while not all(health.alive for health in await pool.health()):
            await asyncio.sleep(0.2)
        restarted: Any = started[2]._handle
        health, sums = await pool.health(), await restarted.checksums.remote()
        await pool.close()
        return samples, health, sums

    samples, health, sums = asyncio.run(drive())
    assert sorted(sample.prompt_id for sample in samples) == sorted(f"p{index}" for index in range(60))
    assert {len(sample.response_ids) for sample in samples} == {150}
    assert [entry.version for entry in health] == [1, 1]
    published = store.open(1)
    assert sums == {name: value for section in published.sections.values() for name, value in section.checksums.items()}
    store.close()
