"""Engines do not wait for environments: the slot of a response that waits for its environment is used by another one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from itertools import count
from typing import Any, ClassVar

import pytest

from mtpctl.environments.environment import EnvironmentClass
from mtpctl.environments.turns import TurnSessions
from mtpctl.rollout.pool import MAX_WAITING_FACTOR, ReplicaPool
from mtpctl.samples import GenerationRequest, Sample
from tests.fakes.busy import PLACES, Bytes, Steady
from tests.fakes.chat import NO_CHAT
from tests.fakes.engines import in_loop
from tests.fakes.replica import FakeReplica


class Slow:
    """Takes a second for each of its two replies."""

    stop: ClassVar = ["!"]

    def __init__(self, problem: object) -> None: ...

    async def reply(self, turn: str) -> str:
        await asyncio.sleep(1.0)
        return "?"


class SlowInThreads(Slow):
    def reply(self, turn: str) -> str:  # type: ignore[override]
        time.sleep(1.0)
        return "?"


async def busy(kind: type | None) -> float:
    """Share of the engine's slots that are in use, over two seconds of a running stage."""
    engine = Steady()

    async def start(index: int) -> Any:
        return engine

    turns = None if kind is None else TurnSessions(EnvironmentClass("tests:it", kind, {}), Bytes(), 3, NO_CHAT)
    pool = await ReplicaPool.start(start, 1, max_in_flight=PLACES, turn_runner=turns)

    async def requests() -> AsyncIterator[GenerationRequest]:
        for number in count():
            yield GenerationRequest(Sample(f"p{number}", f"g{number}", [1]), 500)

    async def drive() -> None:
        async for _ in pool.generate(requests()):
            pass

    driving = asyncio.create_task(drive())
    await asyncio.sleep(1.5)
    began, before = time.monotonic(), engine.occupied.record(engine.in_flight)
    await asyncio.sleep(2.0)
    share = (engine.occupied.record(engine.in_flight) - before) / (PLACES * (time.monotonic() - began))
    driving.cancel()
    await asyncio.gather(driving, return_exceptions=True)
    await pool.close()
    return share


@pytest.mark.parametrize("kind", [Slow, SlowInThreads])
def test_slow_environment_leaves_engines_busy(kind: type) -> None:
    async def both() -> tuple[float, float]:
        return await busy(None), await busy(kind)

    without, loaded = asyncio.run(both())
    assert without > 0.9
    assert loaded > 0.95 * without


@in_loop
async def test_hanging_environment_does_not_admit_unlimited_requests() -> None:
    class Never(Slow):
        async def reply(self, turn: str) -> str:
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

    class Stops(FakeReplica):
        async def generate(self, request: GenerationRequest) -> Sample:
            request.sample.append([ord("!")], [-1.0], 0)
            request.sample.finish_reason = "stop"
            return request.sample

    async def start(index: int) -> Any:
        return Stops()

    pool = await ReplicaPool.start(
        start, 1, max_in_flight=2, turn_runner=TurnSessions(EnvironmentClass("tests:it", Never, {}), Bytes(), 3, NO_CHAT)
    )
    requested = 0

    async def requests() -> AsyncIterator[GenerationRequest]:
        nonlocal requested
        for requested in count(1):
            yield GenerationRequest(Sample(f"p{requested}", "g", [1]), 500)

    async def drive() -> None:
        async for _ in pool.generate(requests()):
            pass

    driving = asyncio.create_task(drive())
    await asyncio.sleep(0.3)
    driving.cancel()
    assert requested == 2 + MAX_WAITING_FACTOR * 2
    await pool.close()
