"""A pool of fake replicas, and its requests and samples."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from mtpctl.rollout.pool import ReplicaPool
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.sync.protocol import Manifest
from tests.fakes.replica import VOCABULARY, FakeReplica

MANIFESTS = {version: Manifest(version, "shm", "/nowhere", {}) for version in range(100)}


class Published:
    """Versions that are retained."""

    def __init__(self) -> None:
        self.there: list[Manifest] = []

    def versions(self) -> list[int]:
        return [manifest.version for manifest in self.there]

    def open(self, version: int) -> Manifest:
        return next(manifest for manifest in self.there if manifest.version == version)


class Fleet:
    """Fakes by seat, newest last, and the versions that a new one may receive."""

    def __init__(self, make: Callable[[int], FakeReplica] | None = None) -> None:
        self.replicas_by_slot: dict[int, list[FakeReplica]] = {}
        self.published = Published()
        self.make = make or (lambda index: FakeReplica())

    async def start(self, index: int) -> FakeReplica:
        await asyncio.sleep(0.002)
        replica = self.make(index)
        self.replicas_by_slot.setdefault(index, []).append(replica)
        return replica

    async def pool(self, count: int, **options: Any) -> ReplicaPool:
        return await ReplicaPool.start(self.start, count, store=self.published, **{"max_in_flight": 8, **options})

    @property
    def live(self) -> list[FakeReplica]:
        return [replicas[-1] for replicas in self.replicas_by_slot.values()]


def requests(count: int, max_tokens: int = 20, group: int = 1) -> list[GenerationRequest]:
    return [GenerationRequest(Sample(f"p{index}", f"g{index // group}", [index % VOCABULARY]), max_tokens) for index in range(count)]


async def collect(pool: ReplicaPool, wanted: list[GenerationRequest]) -> list[Sample]:
    async def stream() -> AsyncIterator[GenerationRequest]:
        for request in wanted:
            yield request

    return [sample async for sample in pool.generate(stream())]


def assert_all_once(samples: list[Sample], count: int, tokens: int = 20) -> None:
    assert sorted(sample.prompt_id for sample in samples) == sorted(f"p{index}" for index in range(count))
    for sample in samples:
        first = sample.prompt_ids[0] + 1
        assert sample.response_ids.tolist() == [(first + step) % VOCABULARY for step in range(tokens)]
        assert len(sample.behaviour_logprobs) == tokens
