"""Deadlines of starts, waiting for the first of a task and an event, and calls in threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from ray.exceptions import RayTaskError

from mtpctl.cluster.deadlines import ChangeNotifier, await_start, await_within, finished_before, run_in_thread
from mtpctl.errors import RuntimeFailure
from mtpctl.samples import Unwanted, finished_before_unwanted
from tests.fakes.event_loop import in_loop

Wait = Callable[[asyncio.Future[Any], Unwanted], Awaitable[bool]]
either_way = pytest.mark.parametrize("first", [finished_before, finished_before_unwanted], ids=["task", "callbacks"])


async def work(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


@in_loop
async def test_late_start_names_the_setting_of_its_deadline() -> None:
    with pytest.raises(RuntimeFailure, match=r"^rollout, start: no answer within 0\.01 s; raise cluster\.actor_deadline_s$"):
        await await_start(work(60.0), 0.01, "rollout")


@pytest.mark.parametrize(
    "error", [TimeoutError("the hub is slow"), RayTaskError("load", "traceback", TimeoutError("the hub is slow")).as_instanceof_cause()]
)
@in_loop
async def test_timeout_error_of_a_call_is_not_reported_as_its_deadline(error: Exception) -> None:
    async def load() -> None:
        raise error

    with pytest.raises(RuntimeFailure, match=r"^rollout, load: TimeoutError: the hub is slow$"):
        await await_within(load(), 60.0, "rollout, load")


@in_loop
async def test_full_gpu_gets_advice_on_the_recipe_instead_of_the_allocator() -> None:
    async def load() -> None:
        message = "CUDA out of memory. GPU 0 has 11.50 MiB free. If reserved but unallocated memory is large try setting X. See Y"
        raise RayTaskError("load", "traceback", torch.OutOfMemoryError(message)).as_instanceof_cause()

    with pytest.raises(
        RuntimeFailure, match=r"^trainer rank 0: OutOfMemoryError: CUDA out of memory\. GPU 0 has 11\.50 MiB free; stop other [^X]*$"
    ):
        await await_within(load(), 60.0, "trainer rank 0")


@either_way
@in_loop
async def test_work_that_finishes_first_returns_its_result(first: Wait) -> None:
    task = asyncio.create_task(work(0.0))
    assert await first(task, Unwanted())
    assert task.result() == "done"


@either_way
@in_loop
async def test_unfinished_work_is_cancelled_when_the_event_is_set(first: Wait) -> None:
    task, event = asyncio.create_task(work(60.0)), Unwanted()
    asyncio.get_running_loop().call_later(0.01, event.set)
    assert not await first(task, event)
    with pytest.raises(asyncio.CancelledError):
        await task


@either_way
@in_loop
async def test_work_that_finishes_with_the_event_counts_as_done(first: Wait) -> None:
    task, event = asyncio.create_task(work(0.0)), Unwanted()
    await asyncio.wait([task])
    event.set()
    assert await first(task, event)


@either_way
@in_loop
async def test_work_is_cancelled_with_its_waiter(first: Wait) -> None:
    task = asyncio.create_task(work(60.0))
    waiting = asyncio.create_task(first(task, Unwanted()))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, task, return_exceptions=True)
    assert waiting.cancelled() and task.cancelled()


@either_way
@in_loop
async def test_an_error_of_the_work_is_raised_by_its_result(first: Wait) -> None:
    async def failing() -> None:
        raise ValueError("refused")

    task = asyncio.create_task(failing())
    assert await first(task, Unwanted())
    with pytest.raises(ValueError, match="refused"):
        task.result()


@in_loop
async def test_a_call_in_a_thread_returns_its_result_or_raises_its_error() -> None:
    assert await run_in_thread(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await run_in_thread(lambda: 1 / 0)


def test_a_hanging_call_in_a_thread_does_not_delay_the_end_of_the_loop() -> None:
    never = threading.Event()

    async def scenario() -> None:
        await asyncio.wait_for(run_in_thread(never.wait), 0.01)

    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(scenario())
    never.set()
    assert time.monotonic() - begin < 30


@in_loop
async def test_each_change_lets_waiters_check_in_the_order_in_which_they_came() -> None:
    changes, free, took = ChangeNotifier(), 0, []

    async def take(name: str) -> None:
        nonlocal free
        await changes.wait_for(lambda: free)
        free -= 1
        took.append(name)

    tasks = [asyncio.create_task(take(name)) for name in "abc"]
    await asyncio.sleep(0)
    tasks[1].cancel()
    for expected in ("a", "ac"):
        free += 1
        changes.notify()
        await asyncio.sleep(0.01)
        assert "".join(took) == expected and free == 0
