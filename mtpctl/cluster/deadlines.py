"""Wait for an actor until a deadline, and for whichever of two things happens first."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Literal, cast

from mtpctl.errors import MtpctlError, RuntimeFailure


async def within[T](waited: Awaitable[T], seconds: float, what: str) -> T:
    """Wait for the answer of an actor, and return it. `what` names the actor and the call in messages.

    Raises RuntimeFailure where the answer takes longer than `seconds`, where the actor dies, or where it raises anything but an
    MtpctlError, which is raised as it is.
    """
    import ray

    async def run() -> T:
        return await waited

    try:
        return await asyncio.wait_for(run(), seconds)
    except TimeoutError as error:
        raise RuntimeFailure(f"{what}: no answer within {seconds:g} s") from error
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, MtpctlError):
            raise cause from error
        raise RuntimeFailure(f"{what}: {one_line(error)}") from error
    except ray.exceptions.RayError as error:
        raise RuntimeFailure(f"{what}: {one_line(error)}") from error


async def finished_before[T](work: asyncio.Future[T], event: asyncio.Event) -> bool:
    """Wait until `work` is done or `event` is set. Returns whether `work` is done; where it is not, cancels it.

    An exception of `work` is left for `work.result()`.
    """
    waiting = asyncio.create_task(event.wait())
    try:
        either: tuple[asyncio.Future[T] | asyncio.Task[Literal[True]], ...] = (work, waiting)
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return work.done()
    finally:
        work.cancel()
        waiting.cancel()


async def in_thread[T](call: Callable[[], T]) -> T:
    """Call a function in a thread, and return its result.

    Unlike `asyncio.to_thread`, a call that hangs does not delay the end of the event loop or the process.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():  # It was cancelled.
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
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, daemon=True).start()
    return await future


def one_line(error: BaseException) -> str:
    """An error as `Kind: first line of its message`; an error that an actor raised, without Ray's wrapper."""
    cause = getattr(error, "cause", None)  # Ray's wrapper carries the traceback in its message.
    shown = cause if isinstance(cause, BaseException) else error
    lines = [line.strip() for line in str(shown).splitlines() if line.strip()]
    return f"{type(shown).__name__}: {lines[0] if lines else 'no message'}"
