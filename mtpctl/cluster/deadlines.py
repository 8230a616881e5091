"""Await actors with a deadline, and other helpers for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Literal, cast

from mtpctl.errors import MtpctlError, RuntimeFailure

_FULL_GPU_ADVICE = (
    "; stop other processes on this GPU or select another one (CUDA_VISIBLE_DEVICES); if there are none, lower "
    "train.tokens_per_microbatch or rollout.gpu_memory (train --dry-run estimates each part)"
)


async def await_within[T](call: Awaitable[T], timeout_s: float, name: str, advice: str = "") -> T:
    """Await the result of an actor call. `name`: the actor and the call, for messages. `advice`: appended to the message of a timeout.

    Raises RuntimeFailure after `timeout_s`, or if the actor dies or raises an error; an MtpctlError is re-raised unchanged. A TimeoutError
    of the call is an error like any other, not the end of `timeout_s`.
    """
    import ray

    try:
        async with asyncio.timeout(timeout_s) as deadline:
            return await call
    except (ray.exceptions.RayError, TimeoutError) as error:
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else None
        if isinstance(cause, MtpctlError):
            raise cause from error
        reason = f"no answer within {timeout_s:g} s{advice}" if deadline.expired() else describe_error(error)
        raise RuntimeFailure(f"{name}: {reason}") from error


async def await_start[T](call: Awaitable[T], deadline_s: float, name: str) -> T:
    """Await the start of an actor for at most `deadline_s` (`cluster.actor_deadline_s`). Raises like `await_within`."""
    return await await_within(call, deadline_s, f"{name}, start", "; raise cluster.actor_deadline_s")


async def finished_before[T](task: asyncio.Future[T], event: asyncio.Event) -> bool:
    """Wait until `task` is done or `event` is set, and cancel `task` unless it is done. Returns whether it is done, even by an error."""
    event_set = asyncio.create_task(event.wait())
    try:
        futures: tuple[asyncio.Future[T] | asyncio.Task[Literal[True]], ...] = (task, event_set)
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        return task.done()
    finally:
        task.cancel()
        event_set.cancel()


class ChangeNotifier:
    """Lets coroutines wait for conditions on shared state: each checks its own condition again after every `notify`.

    Unlike `asyncio.Condition`, it has no lock, because other coroutines cannot run between two awaits.
    """

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def notify(self) -> None:
        """Make all waiters check, in the order in which they began to wait."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait_for(self, condition: Callable[[], object]) -> None:
        """Return once `condition()` is true. The caller runs before the state can change again."""
        while not condition():
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future


async def run_in_thread[T](call: Callable[[], T]) -> T:
    """Like `asyncio.to_thread`, but a call that hangs does not delay the end of the event loop or the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def set_outcome(result: T | None, error: BaseException | None) -> None:
        if future.done():  # cancelled
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast("T", result))

    def run() -> None:
        result, failure = None, None
        try:
            result = call()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # The event loop has ended.
            loop.call_soon_threadsafe(set_outcome, result, failure)

    threading.Thread(target=run, daemon=True).start()
    return await future


def describe_error(error: BaseException) -> str:
    """An error as `Kind: first line of its message`, without Ray's wrapper. For a full GPU, with advice on this project's settings."""
    cause = getattr(error, "cause", None)  # Ray's wrapper has the traceback in its message.
    error = cause if isinstance(cause, BaseException) else error
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = lines[0] if lines else "no message"
    if message.startswith("CUDA out of memory"):
        message = message.partition(" If reserved but unallocated")[0].rstrip(".") + _FULL_GPU_ADVICE
    return f"{type(error).__name__}: {message}"
