"""The handle of an actor: requests are batched, answers reach their callers, and a dead actor fails its requests."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mtpctl.errors import UserError
from mtpctl.rollout.actor import MIN_COLLECT_INTERVAL_S, RayReplica, RolloutActor, _make_picklable
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.rollout.protocol import EngineDead
from mtpctl.rollout.sglang.settings import SglangSettings
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.sync.protocol import PlanMismatch
from tests.fakes.engines import in_loop


class NullEngine:
    """Answers at once; refuses a prompt named `bad`, and never answers one named `late` before `release`."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.under_way = 0

    async def generate(self, request: GenerationRequest) -> Sample:
        sample = request.sample
        if sample.prompt_id == "bad":
            raise UserError("no room for it")
        if sample.prompt_id == "late":
            self.under_way += 1
            try:
                await self.release.wait()
            finally:
                self.under_way -= 1
        sample.append([7] * request.max_tokens, [-0.5] * request.max_tokens, 0)
        sample.finish_reason = "length"
        return sample

    async def shutdown(self) -> None:
        self.release.set()


class NullActor(RolloutActor):
    """An actor around it."""

    def __init__(self) -> None:
        super().__init__(SglangSettings({}))
        self._engine = NullEngine()

    async def start(self) -> Any:
        return None


class Handle:
    """An actor's handle without Ray: counts calls, and dies on request."""

    def __init__(self) -> None:
        self.actor = NullActor()
        self.calls: list[str] = []
        self._death = asyncio.Event()
        self.submit = self._remote(self.actor.submit, "submit")
        self.cancel_requests = self._remote(self.actor.cancel_requests, "cancel_requests")
        self.collect = self._remote(self.actor.collect, "collect")

    def die(self) -> None:
        self._death.set()

    def _remote(self, method: Callable[..., Any], name: str) -> Any:
        from ray.exceptions import RayActorError

        async def call(*args: Any) -> Any:
            self.calls.append(name)
            requested, death = asyncio.ensure_future(method(*args)), asyncio.ensure_future(self._death.wait())
            await asyncio.wait([requested, death], return_when=asyncio.FIRST_COMPLETED)
            if death.done():
                requested.cancel()
                raise RayActorError
            death.cancel()
            return requested.result()

        return type("Method", (), {"remote": staticmethod(call)})()


def request(name: str = "p", tokens: int = 3) -> GenerationRequest:
    return GenerationRequest(Sample(name, "g", [1, 2]), tokens)


@in_loop
async def test_concurrent_requests_and_answers_are_batched_in_one_call() -> None:
    handle = Handle()
    replica = RayReplica(handle, "null")
    samples = await asyncio.gather(*(replica.generate(request(f"p{index}")) for index in range(200)))
    assert [sample.prompt_id for sample in samples] == [f"p{index}" for index in range(200)]
    assert handle.calls.count("submit") == 1
    assert handle.calls.count("collect") <= 2


@in_loop
async def test_answers_are_collected_at_most_once_per_collect_s() -> None:
    handle = Handle()
    replica = RayReplica(handle, "null")

    async def one_after_the_other() -> None:
        for _ in range(10):
            await replica.generate(request())

    began = time.monotonic()
    await asyncio.gather(*(one_after_the_other() for _ in range(20)))
    assert handle.calls.count("collect") <= (time.monotonic() - began) / MIN_COLLECT_INTERVAL_S + 2


def test_hanging_shutdown_kills_the_process_when_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its GPU is needed by its replacement."""
    killed: list[Any] = []
    monkeypatch.setattr("ray.kill", killed.append)

    async def hang() -> None:
        await asyncio.Event().wait()

    async def drive(handle: Any) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(RayReplica(handle, "null").shutdown(), 0.05)

    handle = Handle()
    handle.shutdown = handle._remote(hang, "shutdown")  # type: ignore[attr-defined]
    asyncio.run(drive(handle))
    assert killed == [handle]


@in_loop
async def test_error_reaches_its_caller() -> None:
    replica = RayReplica(Handle(), "null")
    bad, good = await asyncio.gather(replica.generate(request("bad")), replica.generate(request()), return_exceptions=True)
    assert isinstance(bad, UserError)
    assert isinstance(good, Sample)


def test_error_of_a_foreign_package_becomes_a_runtime_error() -> None:
    foreign = type("OutOfBlocks", (ValueError,), {"__module__": "sglang.srt"})
    for error, kind, message in (
        (foreign("none left"), RuntimeError, "OutOfBlocks: none left"),
        (UserError("no room"), UserError, "no room"),
    ):
        try:
            raise error
        except Exception as raised:
            result = pickle.loads(pickle.dumps(_make_picklable(raised)))
        assert (type(result), str(result)) == (kind, message)
        assert "test_replica.py" in result.__notes__[0], "where it was raised"


@in_loop
async def test_dead_actor_fails_all_waiting_requests() -> None:
    handle = Handle()
    replica = RayReplica(handle, "null")
    waiting = [asyncio.ensure_future(replica.generate(request("late"))) for _ in range(5)]
    await asyncio.sleep(0.01)
    handle.die()
    result = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)
    assert all(isinstance(error, EngineDead) for error in result)
    with pytest.raises(EngineDead):
        await asyncio.wait_for(replica.generate(request()), 5)


@in_loop
async def test_cancelled_request_is_cancelled_in_the_engine() -> None:
    handle = Handle()
    replica = RayReplica(handle, "null")
    given_up = [asyncio.ensure_future(replica.generate(request("late"))) for _ in range(50)]
    await asyncio.sleep(0.01)
    for task in given_up:
        task.cancel()
    at_once = asyncio.ensure_future(replica.generate(request("late")))
    await asyncio.sleep(0)
    at_once.cancel()
    await asyncio.sleep(0.01)
    assert handle.actor._engine.under_way == 0 and handle.actor._tasks == {}  # type: ignore[attr-defined]
    assert handle.calls.count("cancel_requests") <= 2
    assert (await asyncio.wait_for(replica.generate(request("next")), 5)).prompt_id == "next"


@pytest.mark.slow
def test_pool_and_actor_overhead_per_request(capsys: pytest.CaptureFixture[str]) -> None:
    """Through the pool and a Ray actor whose engine answers at once: 256 requests together, 128 prompt and 256 response tokens."""
    import ray

    async def stream() -> AsyncIterator[GenerationRequest]:
        for index in range(256):
            yield GenerationRequest(Sample(str(index), str(index), list(range(128))), 256)

    async def start(index: int) -> RayReplica:
        replica = RayReplica(ray.remote(NullActor).options(max_concurrency=1000, num_cpus=1).remote(), "null")
        await replica._call(NullActor.start)
        return replica

    async def drive() -> list[float]:
        pool = await ReplicaPool.start(start, 1, max_in_flight=272)
        taken = []
        for _ in range(6):
            began = time.perf_counter()
            samples = [sample async for sample in pool.generate(stream())]
            taken.append(time.perf_counter() - began)
            assert {sample.prompt_id for sample in samples} == {str(index) for index in range(256)}
        await pool.close()
        return sorted(taken[1:])

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        taken = asyncio.run(drive())
    finally:
        ray.shutdown()
    with capsys.disabled():
        print(f"\n256 requests at once: {taken[2] * 1000:.0f} ms ({taken[0] * 1000:.0f} – {taken[-1] * 1000:.0f})")
    assert taken[2] < 0.256, "a millisecond a request, in the median of five rounds"


def handle_of(start: Callable[[], Any]) -> Any:
    """A handle of an actor whose `start` is this function."""
    return SimpleNamespace(start=SimpleNamespace(remote=start))


def test_error_of_a_dead_actor_is_one_line_with_the_name_of_its_log() -> None:
    from ray.exceptions import ActorDiedError, RayActorError

    async def call() -> None:
        raise RayActorError("a4", f"{ActorDiedError.BASE_ERROR_MSG}\n\tclass_name: A\n\tpid: 22353\n\tip: 10.0.0.2\nCauses include: (1) …")

    with pytest.raises(EngineDead) as died:
        asyncio.run(RayReplica(handle_of(call), "rollout replica 0")._call(RolloutActor.start))
    news, said = str(died.value).split(" Its last output is in ")
    assert news == f"rollout replica 0: {ActorDiedError.BASE_ERROR_MSG}"
    assert said == "Ray's logs on its host, worker-*-22353.err"


def test_actors_mtpctl_error_is_raised_without_rays_traceback() -> None:
    """Without the traceback that Ray puts into the message."""
    from ray.exceptions import RayTaskError

    async def call() -> None:
        raise RayTaskError("update", "Traceback (most recent call last): …", PlanMismatch("lm_head.weight resolves to nothing"))

    with pytest.raises(PlanMismatch) as refused:
        asyncio.run(RayReplica(handle_of(call), "rollout replica 0")._call(RolloutActor.start))
    assert str(refused.value) == "lm_head.weight resolves to nothing"
