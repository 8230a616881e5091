"""Replicas as they run: ranks in Ray actors, tensor-parallel over gloo, killed under load."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mtpctl.cluster.local import cluster
from mtpctl.convert.hf_folder import create_hf_folder
from mtpctl.logprob.dispatch import ServerLimits
from mtpctl.logprob.protocol import Scored, ScoreRequest
from mtpctl.logprob.replica import RayRanks, Replica, start_replica
from mtpctl.logprob.server import LogprobServer
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.schema import ClusterConfig
from mtpctl.recipe.section import ParallelConfig
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import VersionStore
from tests.fakes import adapters
from tests.fakes.logprob_ranks import CONFIG, Loop, replica_config

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


async def started(folder: Path, count: int, store: VersionStore | None = None, **changes: Any) -> LogprobServer:
    config = replica_config(folder, **changes)

    async def start(index: int) -> Replica:
        return await start_replica(config, name=f"log-prob replica {index}", options=[{"num_cpus": 0}] * config.parallel.world_size)

    return await LogprobServer.start(start, count, ServerLimits(1024, 1 << 20, max_restarts=30), store=store)


@dataclass(frozen=True)
class ServedAnswer:
    """A request, its answer, and the server's version at the request and at the answer."""

    scored: ScoreRequest
    answer: Scored
    before: int
    after: int


async def kill_under_load(
    server: LogprobServer, kills: int, generator: random.Random, update: Callable[[], Awaitable[None]] | None = None
) -> list[ServedAnswer]:
    """Answers to requests that keep coming while replicas are killed, each after the one before it was replaced.

    `update`: called before every other kill.
    """
    answers: list[ServedAnswer] = []
    ending = asyncio.Event()

    async def ask(scored: ScoreRequest) -> None:
        before = server.version
        answer = await server.score(scored)
        answers.append(ServedAnswer(scored, answer, before, server.version))

    async def client(number: int) -> None:
        turn = 0
        while not ending.is_set():
            await asyncio.gather(*map(ask, requests(16, seed=1000 * number + turn)))
            await asyncio.sleep(0.1)
            turn += 1

    async def trouble() -> None:
        for number in range(kills):
            if update is not None and number % 2:
                await update()
            await asyncio.sleep(generator.uniform(0, 0.2))
            (_, victim) = generator.choice(server.replicas.live())
            before = server.replicas.num_restarts
            os.kill((await pids(victim))[0], signal.SIGKILL)
            while server.replicas.num_restarts == before:
                await asyncio.sleep(0.05)
        ending.set()

    await asyncio.gather(trouble(), *(client(number) for number in range(4)))
    assert server.counters.failed == 0 and server.counters.requests == len(answers)
    assert server.replicas.num_restarts == kills
    assert all(message.before <= message.answer.version <= message.after for message in answers)
    return answers


async def check_as_at_rest(server: LogprobServer, answers: list[ServedAnswer]) -> None:
    """A thousand answers during updates and kills are bit-identical to those of an idle server."""
    answers = random.Random(0).sample(answers, min(1000, len(answers)))
    calm = await asyncio.gather(*(server.score(message.scored) for message in answers))
    assert [message.answer.logprobs for message in answers] == [answer.logprobs for answer in calm]


@pytest.mark.slow
def test_a_killed_replica_loses_nothing(run: Loop, ray_cluster: None, folder: Path) -> None:
    async def ask() -> None:
        server = await started(folder, 1)
        await check_as_at_rest(server, await kill_under_load(server, 1, random.Random(0)))
        await server.close()

    run(ask(), 270)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_twenty_kills_lose_nothing_and_mix_no_versions(
    run: Loop, ray_cluster: None, folder: Path, other_folder: Path, tmp_path: Path
) -> None:
    """Two replicas, 20 kills and ten updates; weights alternate between two sets, so an answer shows which set computed it."""
    weights = [load_file(path / "model.safetensors") for path in (folder, other_folder)]
    store = VersionStore(tmp_path / "versions")
    publisher = Publisher(store, bucket_bytes=1 << 16)

    async def ask() -> None:
        server = await started(folder, 2, store)

        async def update() -> None:
            version = server.version + 1
            await server.update(publisher.publish(iter(weights[version % 2].items()), version))

        answers = await kill_under_load(server, 20, random.Random(1), update)
        assert server.version == 10 and {message.answer.version for message in answers} == set(range(11))
        for parity in (0, 1):
            await check_as_at_rest(server, [message for message in answers if message.answer.version % 2 == parity])
            await update()
        print(f"{len(answers)} answers, {server.counters.retried} asked again, {server.counters.batches} batches")
        await server.close()

    run(ask(), 1700)


@pytest.mark.slow
def test_tensor_parallel_ranks_answer_as_one_does(run: Loop, ray_cluster: None, folder: Path) -> None:
    """tp 4 over two key-value heads, so that neighbours share one; a rank that dies takes its group with it."""

    async def ask() -> None:
        single = await started(folder, 1)
        wide = await started(folder, 1, parallel=ParallelConfig(tp=4))
        for scored in requests(6):
            a, b = await asyncio.gather(single.score(scored), wide.score(scored))
            assert a.logprobs == pytest.approx(b.logprobs, abs=2e-5)
        assert wide.replicas.slots[0].replica is not None
        os.kill((await pids(wide.replicas.slots[0].replica))[3], signal.SIGKILL)
        scored = requests(1)[0]
        a, b = await asyncio.gather(single.score(scored), wide.score(scored))
        assert a.logprobs == pytest.approx(b.logprobs, abs=2e-5) and wide.replicas.num_restarts == 1
        await single.close()
        await wide.close()

    run(ask(), 270)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_ranks_merge_an_adapter_each_into_its_part(
    layout: dict[str, int], run: Loop, ray_cluster: None, folder: Path, tmp_path: Path
) -> None:
    """Version after version, and after a death, over what the folder holds."""
    base = load_file(folder / "model.safetensors")
    sends = adapters.publisher(tmp_path / "versions")
    sends.next_sections = ("adapter", "draft")

    async def ask() -> None:
        single, split = [await started(folder, 1, sends.store, parallel=ParallelConfig(**one)) for one in ({}, layout)]
        last: list[float] = []
        for version in (1, 2):
            manifest = sends.publish((adapters.adapter(base, version) | base).items(), version, checksums=True)
            for server in (single, split):
                (report,) = await server.update(manifest, verify=True)
                assert report.verified == len(manifest.sections["adapter"].checksums) + len(manifest.sections["draft"].checksums)
            scored = requests(1)[0]
            a, b = await asyncio.gather(single.score(scored), split.score(scored))
            assert a.version == b.version == version and a.logprobs == pytest.approx(b.logprobs, abs=2e-5)
            assert a.logprobs != pytest.approx(last, abs=1e-3)
            last = a.logprobs
        assert split.replicas.slots[0].replica is not None
        os.kill((await pids(split.replicas.slots[0].replica))[1], signal.SIGKILL)
        b = await split.score(scored)
        assert b.version == 2 and b.logprobs == pytest.approx(last, abs=2e-5) and split.replicas.num_restarts == 1
        await single.close()
        await split.close()

    run(ask(), 270)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_ranks_write_changes_each_into_its_part(layout: dict[str, int], run: Loop, ray_cluster: None, tmp_path: Path) -> None:
    """With a tied head, which another pipeline stage has a copy of."""
    model = create_hf_folder({**CONFIG, "tie_word_embeddings": True}, tmp_path / "model", seed=3).path
    weights = load_file(model / "model.safetensors")
    same = {"lm_head.weight": "model.embed_tokens.weight"}
    sends = Publisher(VersionStore(tmp_path / "versions"), bucket_bytes=1 << 16, delta=True)
    sent = {name: value for name, value in weights.items() if name not in same}
    sends.plan_from(iter(sent.items()), same)
    generator = torch.Generator().manual_seed(0)

    async def ask() -> None:
        single, split = [await started(model, 1, sends.store, parallel=ParallelConfig(**one)) for one in ({}, layout)]
        (scored,) = requests(1)
        last = (await single.score(scored)).logprobs
        for version in (1, 2, 3):
            for tensor in sent.values():
                mask = torch.rand(tensor.shape, generator=generator) < 0.02
                tensor[mask] = -2 * tensor[mask]
            manifest = sends.publish(iter(sent.items()), version, checksums=True)
            assert manifest.base == (version - 1 or None)
            for server in (single, split):
                (report,) = await server.update(manifest, verify=True)
                assert report.verified == len(sent)
            a, b = await asyncio.gather(single.score(scored), split.score(scored))
            assert a.version == b.version == version and a.logprobs == pytest.approx(b.logprobs, abs=2e-5)
            assert a.logprobs != pytest.approx(last, abs=1e-3)
            last = a.logprobs
        await single.close()
        await split.close()

    run(ask(), 270)


@pytest.mark.slow
def test_tied_head_on_a_separate_stage_has_the_new_version(run: Loop, ray_cluster: None, tmp_path: Path) -> None:
    """Also if the update is stored next to the previous version until it is complete."""
    tied = {**CONFIG, "tie_word_embeddings": True}
    model, others = (create_hf_folder(tied, tmp_path / str(seed), seed=seed).path for seed in (3, 9))
    weights = {name: value for name, value in load_file(others / "model.safetensors").items() if ".mtp_layers." not in name}
    same = {"lm_head.weight": "model.embed_tokens.weight"}
    sends = Publisher(VersionStore(tmp_path / "versions"), bucket_bytes=1 << 16, sections=("target",))
    target = {name: value for name, value in weights.items() if name not in same}
    sends.plan_from(iter(target.items()), same)
    manifest = sends.publish(iter(target.items()), 1)
    layout = {"mtp": MtpConfig(mode="off"), "parallel": ParallelConfig(pp=2), "keep_previous": True}

    async def ask() -> None:
        updated, fresh = await started(model, 1, **layout), await started(others, 1, **layout)
        (scored,) = requests(1)
        before = await updated.score(scored)
        await updated.update(manifest)
        a, b = await asyncio.gather(updated.score(scored), fresh.score(scored))
        assert a.version == 1 and a.logprobs == pytest.approx(b.logprobs, abs=2e-5)
        (replica,) = (replica for _, replica in updated.replicas.live())
        assert (await replica.score([scored], 0))[0].logprobs == before.logprobs
        await updated.close()
        await fresh.close()

    run(ask(), 270)
