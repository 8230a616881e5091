"""Await work or an event, whichever comes first, and calls in threads."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from mtpctl.cluster.deadlines import finished_before, in_thread
from tests.fakes.event_loop import in_loop


async def work(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


@in_loop
async def test_work_that_finishes_first_returns_its_result() -> None:
    task = asyncio.create_task(work(0.0))
    assert await finished_before(task, asyncio.Event())
    assert task.result() == "done"


@in_loop
async def test_unfinished_work_is_cancelled_when_the_event_is_set() -> None:
    task, event = asyncio.create_task(work(60.0)), asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, event.set)
    assert not await finished_before(task, event)
    with pytest.raises(asyncio.CancelledError):
        await task


@in_loop
async def test_work_that_finishes_with_the_event_counts_as_done() -> None:
    task, event = asyncio.create_task(work(0.0)), asyncio.Event()
    await asyncio.wait([task])
    event.set()
    assert await finished_before(task, event)


@in_loop
async def test_work_is_cancelled_with_its_waiter() -> None:
    task = asyncio.create_task(work(60.0))
    waiting = asyncio.create_task(finished_before(task, asyncio.Event()))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, task, return_exceptions=True)
    assert waiting.cancelled() and task.cancelled()


@in_loop
async def test_an_error_of_the_work_is_raised_by_its_result() -> None:
    async def failing() -> None:
        raise ValueError("refused")

    task = asyncio.create_task(failing())
    assert await finished_before(task, asyncio.Event())
    with pytest.raises(ValueError, match="refused"):
        task.result()


@in_loop
async def test_a_call_in_a_thread_returns_its_result_or_raises_its_error() -> None:
    assert await in_thread(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 / 0)


def test_a_hanging_call_in_a_thread_does_not_delay_the_end_of_the_loop() -> None:
    never = threading.Event()

    async def scenario() -> None:
        await asyncio.wait_for(in_thread(never.wait), 0.01)

    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(scenario())
    never.set()
    assert time.monotonic() - begin < 30
