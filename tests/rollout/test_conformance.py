"""What every `Generator` does, whichever engine is behind it: the tests' fake, a real vLLM and a real SGLang pass the same suite.

On a GPU: `python -m pytest -m gpu tests/rollout/test_conformance.py -k vllm-gpu`, and in SGLang's environment `-k sglang`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mtpctl.rollout.actor import EngineSettings
from mtpctl.rollout.engine import Engine
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.rollout.protocol import DEADLINE, Generator
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.sync.protocol import Manifest
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import VersionStore
from tests.fakes.engine_checkpoints import Tensors, cycle_tensors, random_tensors, tiny_config, write_checkpoint
from tests.fakes.engines import Loop, cpu_settings, gpu_settings, sglang_settings
from tests.fakes.replica import FakeReplica


@dataclass(frozen=True)
class Kind:
    """One engine, the model that it serves, seconds until a response that was just sent has some tokens, and how many last longer."""

    name: str
    settings: Callable[[Path], EngineSettings] | None = None
    config: dict[str, Any] = field(default_factory=tiny_config)
    settle_s: float = 0.03
    long: int = 120

    def weights(self, version: int) -> Tensors:
        """Random weights; on a GPU, where no draw is repeated to the bit in every batch, those of a cycle."""
        if self.config is not GPU_CONFIG:
            return random_tensors(self.config, version)
        return {name: tensor.bfloat16() for name, tensor in cycle_tensors(self.config, 5 + version, 5 + version).items()}


GPU_CONFIG = tiny_config(vocab_size=128, torch_dtype="bfloat16", max_position_embeddings=4096)
ON_GPUS = [Kind(name, settings, GPU_CONFIG, 0.3, 3000) for name, settings in (("vllm-gpu", gpu_settings), ("sglang", sglang_settings))]
KINDS = [Kind("fake"), Kind("vllm", cpu_settings), *(pytest.param(kind, marks=pytest.mark.gpu) for kind in ON_GPUS)]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture(scope="module")
def pool(kind: Kind, run: Loop, start_engine: Callable[[EngineSettings], Engine], tmp_path_factory: pytest.TempPathFactory) -> ReplicaPool:
    replica: FakeReplica | Engine = FakeReplica()
    if kind.settings is not None:
        folder = write_checkpoint(tmp_path_factory.mktemp("model"), kind.config, kind.weights(0))
        replica = start_engine(kind.settings(folder))

    async def start(index: int) -> Any:
        return replica

    return run(ReplicaPool.start(start, 1, max_in_flight=16))


@pytest.fixture(scope="module")
def published(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manifest]:
    store = VersionStore(tmp_path_factory.mktemp("store"))
    yield Publisher(store, bucket_bytes=1 << 30).publish(kind.weights(1).items(), 1)
    store.close()


async def stream(requests: list[GenerationRequest]) -> AsyncIterator[GenerationRequest]:
    for request in requests:
        yield request


async def collect(pool: Generator, requests: list[GenerationRequest]) -> dict[str, Sample]:
    result: dict[str, Sample] = {}
    async for sample in pool.generate(stream(requests)):
        assert sample.prompt_id not in result
        result[sample.prompt_id] = sample
    return result


def requests(count: int, max_tokens: int = 20, **options: object) -> list[GenerationRequest]:
    return [
        GenerationRequest(Sample(f"p{index}", f"g{index // 4}", [5, 6, index % 40]), max_tokens, seed=index, **options)  # type: ignore[arg-type]
        for index in range(count)
    ]


def assert_whole(sample: Sample) -> None:
    tokens = len(sample.response_ids)
    assert len(sample.behaviour_logprobs) == len(sample.loss_mask) == tokens
    assert [span.start for span in sample.version_spans] == [0, *(span.end for span in sample.version_spans[:-1])]
    assert not tokens or sample.version_spans[-1].end == tokens
    assert all(logprob <= 0 for logprob in sample.behaviour_logprobs)


def test_every_request_is_answered_once(pool: ReplicaPool, run: Loop) -> None:
    result = run(collect(pool, requests(40)))
    assert result.keys() == {f"p{index}" for index in range(40)}
    for sample in result.values():
        assert sample.finish_reason == "length"
        assert len(sample.response_ids) == 20
        assert_whole(sample)


def test_no_requests_no_samples(pool: ReplicaPool, run: Loop) -> None:
    assert run(collect(pool, [])) == {}


def test_requests_are_drawn_only_when_there_is_room(pool: ReplicaPool, run: Loop) -> None:
    drawn = answered = 0

    async def source() -> AsyncIterator[GenerationRequest]:
        nonlocal drawn
        for request in requests(60):
            drawn += 1
            assert drawn - answered <= 16
            yield request

    async def consume() -> None:
        nonlocal answered
        async for _ in pool.generate(source()):
            answered += 1

    run(consume())
    assert answered == 60


def test_a_stop_token_stops(pool: ReplicaPool, run: Loop) -> None:
    whole = run(collect(pool, requests(1)))["p0"]
    stop = whole.response_ids[4]
    stopped = run(collect(pool, requests(1, stop_token_ids=[stop])))["p0"]
    assert stopped.finish_reason == "stop"
    assert stopped.response_ids == whole.response_ids[: whole.response_ids.index(stop) + 1]


def test_a_response_ends_at_the_first_of_several_end_tokens(pool: ReplicaPool, run: Loop) -> None:
    whole = run(collect(pool, requests(1)))["p0"]
    later, earlier = whole.response_ids[9], whole.response_ids[4]
    stopped = run(collect(pool, requests(1, stop_token_ids=[later, earlier])))["p0"]
    length = min(list(whole.response_ids).index(later), list(whole.response_ids).index(earlier)) + 1
    assert (stopped.finish_reason, stopped.response_ids) == ("stop", whole.response_ids[:length])


def test_a_deadline_ends_one_response_and_no_other(kind: Kind, pool: ReplicaPool, run: Loop) -> None:
    async def drive() -> dict[str, Sample]:
        task = asyncio.ensure_future(collect(pool, [*requests(1, 2 * kind.long, deadline_s=0.03), *requests(4)[1:]]))
        return await task

    result = run(drive())
    assert result["p0"].finish_reason == DEADLINE
    assert len(result["p0"].response_ids) < 2 * kind.long
    assert_whole(result["p0"])
    assert {result[f"p{index}"].finish_reason for index in (1, 2, 3)} == {"length"}


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_engine_generates_nothing_between_pause_and_resume(pool: ReplicaPool, run: Loop, mode: str) -> None:
    async def drive() -> tuple[int, dict[str, Sample]]:
        early = 0
        task = asyncio.ensure_future(collect(pool, requests(12, 60)))
        await asyncio.sleep(0.02)
        await pool._replicas.call_each(lambda engine: engine.pause(mode))  # type: ignore[arg-type]
        late = asyncio.ensure_future(collect(pool, requests(16)[12:]))
        await asyncio.sleep(0.1)
        assert not late.done()
        early = task.done()
        await pool._replicas.call_each(lambda engine: engine.resume())  # type: ignore[attr-defined]
        return early, await task | await late

    early, result = run(drive())
    assert early == (mode == "wait")
    assert result.keys() == {f"p{index}" for index in range(16)}
    for index in range(12):
        assert len(result[f"p{index}"].response_ids) == 60
    for sample in result.values():
        assert sample.finish_reason == "length"
        assert_whole(sample)


def test_an_update_shows_in_the_spans(kind: Kind, pool: ReplicaPool, run: Loop, published: Manifest) -> None:
    async def drive() -> dict[str, Sample]:
        task = asyncio.ensure_future(collect(pool, requests(8, kind.long)))
        await asyncio.sleep(kind.settle_s)
        (report,) = await pool.update(published)
        assert report.version == 1
        return await task

    for sample in run(drive()).values():
        assert [span.version for span in sample.version_spans] == [0, 1]
        assert len(sample.response_ids) == kind.long
        assert_whole(sample)


def test_health_names_the_version(pool: ReplicaPool, run: Loop) -> None:
    (health,) = run(pool.health())
    assert health.alive
    assert health.version == 1
    assert health.in_flight == 0
