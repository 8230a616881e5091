"""Replicas as they run: ranks in Ray actors, tensor-parallel over gloo, killed under load."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mtpctl.cluster import cluster
from mtpctl.logprob import LogprobServer, Replica, ScoreRequest, ServerLimits, start_replica
from mtpctl.logprob.replica import RayRanks
from mtpctl.recipe.schema import ClusterConfig, ParallelConfig
from tests.logprob.conftest import Loop, replica_config

pytestmark = pytest.mark.timeout(280)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    with cluster(ClusterConfig(num_cpus=8), cpus=0, gpus=0):
        yield


def requests(count: int, seed: int = 0) -> list[ScoreRequest]:
    generator = random.Random(seed)
    return [ScoreRequest([generator.randrange(320) for _ in range(generator.randint(2, 200))]) for _ in range(count)]


async def pids(replica: Replica) -> list[int]:
    assert isinstance(replica.ranks, RayRanks)
    return await asyncio.gather(*(one(handle.__ray_call__.remote(lambda _: os.getpid())) for handle in replica.ranks.handles))


async def one(ref: Any) -> Any:
    return await ref


async def started(folder: Path, count: int, **changes: Any) -> LogprobServer:
    config = replica_config(folder, **changes)

    async def start(index: int) -> Replica:
        return await start_replica(config, name=f"log-prob replica {index}", cpus=0, gpus=0)

    return await LogprobServer.start(start, count, ServerLimits(1024, 1 << 20, max_restarts=30))


async def kill_and_count(server: LogprobServer, kills: int, generator: random.Random) -> list[tuple[ScoreRequest, Any]]:
    """Answers to requests that keep coming while replicas are killed; each kill waits for a replica that serves."""
    answers: list[tuple[ScoreRequest, Any]] = []
    ending = asyncio.Event()

    async def client(number: int) -> None:
        turn = 0
        while not ending.is_set():
            for asked in requests(8, seed=1000 * number + turn):
                answers.append((asked, await server.score(asked)))
            turn += 1

    async def trouble() -> None:
        for _ in range(kills):
            while not (alive := [seat.replica for seat in server.replicas.seats if seat.replica is not None]):
                await asyncio.sleep(0.05)
            os.kill((await pids(generator.choice(alive)))[0], signal.SIGKILL)
            before = server.replicas.restarts
            while server.replicas.restarts == before:
                await asyncio.sleep(0.05)
        ending.set()

    await asyncio.gather(trouble(), *(client(number) for number in range(4)))
    return answers


async def check(server: LogprobServer, answers: list[tuple[ScoreRequest, Any]]) -> None:
    """Answers that came through all that are those of a server at rest."""
    for asked, answer in random.Random(0).sample(answers, min(40, len(answers))):
        calm = await server.score(asked)
        assert answer.logprobs == pytest.approx(calm.logprobs, abs=1e-5)


@pytest.mark.slow
def test_a_killed_replica_loses_nothing(run: Loop, ray_cluster: None, folder: Path) -> None:
    async def ask() -> None:
        server = await started(folder, 1)
        answers = await kill_and_count(server, 1, random.Random(0))
        assert server.replicas.restarts == 1 and answers
        await check(server, answers)
        await server.close()

    run(ask(), 270)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_twenty_kills_lose_nothing(run: Loop, ray_cluster: None, folder: Path) -> None:
    async def ask() -> None:
        server = await started(folder, 2)
        answers = await kill_and_count(server, 20, random.Random(1))
        assert server.replicas.restarts == 20 and server.counters.failed == 0
        await check(server, answers)
        await server.close()

    run(ask(), 1700)


@pytest.mark.slow
def test_tensor_parallel_ranks_answer_as_one_does(run: Loop, ray_cluster: None, folder: Path) -> None:
    """tp 4 over two key-value heads, so that neighbours share one; a rank that dies takes its group with it."""

    async def ask() -> None:
        single = await started(folder, 1)
        wide = await started(folder, 1, parallel=ParallelConfig(tp=4))
        for asked in requests(6):
            a, b = await asyncio.gather(single.score(asked), wide.score(asked))
            assert a.logprobs == pytest.approx(b.logprobs, abs=2e-5)
        assert wide.replicas.seats[0].replica is not None
        os.kill((await pids(wide.replicas.seats[0].replica))[3], signal.SIGKILL)
        asked = requests(1)[0]
        a, b = await asyncio.gather(single.score(asked), wide.score(asked))
        assert a.logprobs == pytest.approx(b.logprobs, abs=2e-5) and wide.replicas.restarts == 1
        await single.close()
        await wide.close()

    run(ask(), 270)
