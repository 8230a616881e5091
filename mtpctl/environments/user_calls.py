"""Calls of a user's own methods, from an event loop that must not stop for them.

Plain methods run in daemon threads and coroutines on an event loop in a thread of its own, so a method that blocks holds up neither the
loop that called nor, at the end, the process. Whatever a method raises is an exception of the call, and never ends thread or loop.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread

BEAT_S = 0.25
BLOCKED_S = 5.0
"""Seconds without a beat after which an event loop counts as blocked by a coroutine."""

Job = Callable[[], object]


class MethodRaised(Exception):
    """The method raised `cause`, which may be no `Exception`, such as SystemExit."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class UserThread:
    """Makes plain calls, one after the other, always in the same thread. `busy`: one of them has not returned yet."""

    def __init__(self) -> None:
        self.busy = False
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = Thread(target=self._run, daemon=True, name="environment")
        self._thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self.busy = True
            job()
            self.busy = False

    async def call(self, method: Job) -> object:
        """What the method returns. Raises MethodRaised. A caller that is cancelled leaves the method running."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[tuple[object, BaseException | None]] = loop.create_future()

        def settle(value: object, error: BaseException | None) -> None:
            if not done.done():
                done.set_result((value, error))

        def job() -> None:
            value, error = _outcome(method)
            with suppress(RuntimeError):  # the loop that waited has been closed
                loop.call_soon_threadsafe(settle, value, error)

        self._jobs.put(job)
        value, error = await done
        if error is not None:
            raise MethodRaised(error)
        return value

    def end(self) -> None:
        """End the thread, after the calls that were made so far."""
        self._jobs.put(None)


class UserLoop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._beat = time.monotonic()
        self._loop.call_soon(self._tick)
        Thread(target=self._loop.run_forever, daemon=True, name="environments").start()

    def _tick(self) -> None:
        self._beat = time.monotonic()
        self._loop.call_later(BEAT_S, self._tick)

    @property
    def blocked(self) -> bool:
        """Whether a coroutine keeps the loop from running any other one."""
        return time.monotonic() - self._beat > BLOCKED_S

    async def call(self, method: Job) -> object:
        """What the method returns, or what it returns a coroutine for. Raises MethodRaised. Cancelling the caller cancels the coroutine."""

        async def run() -> tuple[object, BaseException | None]:
            value, error = _outcome(method)
            if error is None and inspect.isawaitable(value):
                try:
                    value = await value
                except asyncio.CancelledError:
                    raise
                except BaseException as raised:
                    value, error = None, raised
            return value, error

        try:
            value, error = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self._loop))
        except asyncio.CancelledError as cancelled:
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                raise
            # The coroutine was cancelled by itself, and the caller was not.
            raise MethodRaised(cancelled) from cancelled
        if error is not None:
            raise MethodRaised(error)
        return value

    def end(self) -> None:
        """Stop the loop, as soon as no coroutine blocks it."""
        self._loop.call_soon_threadsafe(self._loop.stop)


class UserLoops:
    """The event loop for a new environment: always one that is not blocked."""

    def __init__(self) -> None:
        self._loops: list[UserLoop] = []

    def current(self) -> UserLoop:
        if not self._loops or self._loops[-1].blocked:
            self._loops.append(UserLoop())
        return self._loops[-1]

    def end(self) -> None:
        for loop in self._loops:
            loop.end()
        self._loops.clear()


def _outcome(method: Job) -> tuple[object, BaseException | None]:
    try:
        return method(), None
    except BaseException as error:  # also SystemExit, which would end the thread
        return None, error
