"""Replicas in separate processes, killed at random moments: every prompt is answered exactly once, on one host and on two.

The engines are made up, so that twenty deaths take a minute; one real vLLM that is killed is `test_actor`'s.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mtpctl.rollout.actor import RayReplica, RolloutActor
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.rollout.sglang.settings import SglangSettings
from mtpctl.samples import GenerationRequest, Sample
from tests.fakes.replica import VOCABULARY, FakeReplica

KILLS = 20
PROMPTS, TOKENS = 3000, 60


class FakeActor(RolloutActor):
    """An actor around a fake engine."""

    def __init__(self) -> None:
        super().__init__(SglangSettings({}))
        self._engine = FakeReplica(tick_s=0.001)

    async def start(self) -> None: ...

    async def node(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())


async def stream(count: int) -> AsyncIterator[GenerationRequest]:
    for index in range(count):
        yield GenerationRequest(Sample(f"p{index}", f"g{index // 4}", [index % VOCABULARY]), TOKENS)


async def start_fake(index: int, **options: Any) -> RayReplica:
    import ray

    handle = ray.remote(FakeActor).options(max_concurrency=1000, **options).remote()
    replica = RayReplica(handle, f"fake {index}")
    await replica._call(FakeActor.start)
    return replica


def assert_answered_once(samples: list[Sample], count: int) -> None:
    assert sorted(sample.prompt_id for sample in samples) == sorted(f"p{index}" for index in range(count))
    for sample in samples:
        first = sample.prompt_ids[0]
        assert sample.response_ids.tolist() == [(first + 1 + place) % VOCABULARY for place in range(TOKENS)]
        assert len(sample.behaviour_logprobs) == len(sample.loss_mask) == TOKENS


@pytest.mark.chaos
@pytest.mark.timeout(280)
def test_twenty_kills_at_random_moments_lose_and_double_nothing() -> None:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    alive: list[RayReplica] = []

    async def start(index: int) -> RayReplica:
        alive.append(await start_fake(index, num_cpus=0.1))
        return alive[-1]

    async def drive() -> list[Sample]:
        pool = await ReplicaPool.start(start, 2, max_in_flight=16, max_restarts=2 * KILLS)
        draw, killed = random.Random(0), 0
        samples: list[Sample] = []

        async def kill() -> None:
            nonlocal killed
            while killed < KILLS:
                await asyncio.sleep(draw.uniform(0.05, 0.4))
                victim = alive[-1 - draw.randrange(2)]
                try:
                    os.kill(await victim.pid(), signal.SIGKILL)
                except Exception:  # it died before it was asked: another one is due
                    continue
                killed += 1

        killing = asyncio.ensure_future(kill())
        # Prompts go on until the last kill, and a while beyond.
        sent = 0

        async def endless() -> AsyncIterator[GenerationRequest]:
            nonlocal sent
            async for request in stream(1 << 30):
                if killing.done() and sent >= PROMPTS // 10:
                    return
                sent += 1
                yield request

        async for sample in pool.generate(endless()):
            samples.append(sample)
        await killing
        assert killed == KILLS
        assert_answered_once(samples, sent)
        await pool.close()
        return samples

    try:
        samples = asyncio.run(drive())
    finally:
        ray.shutdown()
    print(f"{len(samples)} prompts answered once through {KILLS} kills")


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_replicas_on_two_hosts_share_the_work_and_outlive_one_of_them() -> None:
    import ray
    from ray.cluster_utils import Cluster

    hosts = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    other = hosts.add_node(num_cpus=1)
    ray.init(address=hosts.address, log_to_driver=False)

    async def start(index: int) -> RayReplica:
        return await start_fake(index, num_cpus=0.5, scheduling_strategy="SPREAD")

    async def drive() -> tuple[set[str], list[Sample]]:
        pool = await ReplicaPool.start(start, 2, max_in_flight=16)
        live = [replica for _, replica in pool._replicas.live()]
        nodes = {await replica._call(FakeActor.node) for replica in live}  # type: ignore[attr-defined]

        async def lose_a_host() -> None:
            await asyncio.sleep(1.0)
            await asyncio.to_thread(hosts.remove_node, other)

        losing = asyncio.ensure_future(lose_a_host())
        samples = [sample async for sample in pool.generate(stream(400))]
        await losing
        await pool.close()
        return nodes, samples

    try:
        nodes, samples = asyncio.run(drive())
    finally:
        ray.shutdown()
        hosts.shutdown()
    assert len(nodes) == 2
    assert_answered_once(samples, 400)
