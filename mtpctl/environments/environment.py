"""Environments: classes that reply to the model between the turns of a response, such as a tool, a game or a simulated user.

Each response has its own instance of a built-in or user-defined class. It is created with the problem and `rollout.environment_args`, and
closed when the response ends. The user's methods are called without blocking the event loop: plain methods run in daemon threads,
coroutines on an event loop in a separate thread. An exception of a method fails its call, and never ends the thread or loop.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

from mtpctl.errors import UserError
from mtpctl.recipe.rollout import ENVIRONMENTS, RolloutBase
from mtpctl.samples import Sample
from mtpctl.user_code import check_call, describe_error, from_environment, load

ENVIRONMENT_KEY = "rollout.environment"
MAX_REPLY_LENGTH = 1_000_000
"""Maximum length of a reply in characters. It exceeds every context."""
MAX_ERROR_LENGTH = 500
"""Maximum length of a reported error of user code in characters."""
CLOSE_TIMEOUT_S = 10.0
"""Timeout of `close`, and of `reward` if the deadline of the response has passed."""

Message = Mapping[str, object]
"""A chat message: `role` and `content`, both text, and other fields of the chat template."""
Reply = str | list[Message] | None


class Environment(Protocol):
    """A user-defined environment. Its methods may be coroutine functions. If `reply` is one, plain methods run on the event loop too.

    `stop`: strings that end a turn of the model. If it is empty, the model's end token ends a turn. Optional methods: `reward() -> float`
    after the response, `tools() -> list` of JSON schemas for the chat template, and `close()`.
    """

    stop: Sequence[str]

    def reply(self, turn: str) -> Reply:
        """The text to append to the model's turn `turn`, which ends with one of `stop`. None or an empty text ends the response."""
        ...


class EnvironmentFailure(Exception):
    """An environment raised, or returned an invalid value. The message is one line with its file and line."""


@dataclass(frozen=True, slots=True)
class EnvironmentClass:
    """The recipe's environment class (`reference`), and the keyword arguments of its instances."""

    reference: str
    make: type
    args: Mapping[str, object]

    @property
    def is_async(self) -> bool:
        """Whether its methods run on an event loop instead of one thread per response."""
        return inspect.iscoroutinefunction(getattr(self.make, "reply", None))

    def location_of(self, method: str) -> str:
        """Location of a method or of `stop` for messages: `tool.py:12: Echo.reply`."""
        attribute = getattr(self.make, method, None)
        code = getattr(
            inspect.unwrap(attribute if callable(attribute) else inspect.getattr_static(self.make, "__init__")), "__code__", None
        )
        location = "" if code is None else f"{Path(code.co_filename).name}:{code.co_firstlineno}: "
        return f"{location}{self.make.__name__}.{method}"


def load_environment_class(rollout: RolloutBase) -> EnvironmentClass | None:
    """The recipe's environment; None if a response is a single turn or an agent's.

    Raises UserError for a missing file, module or name, and for a class that cannot be instantiated or has no `reply`.
    """
    if rollout.environment == "single" or rollout.uses_agents:
        return None
    reference = ENVIRONMENTS.get(rollout.environment, rollout.environment)
    environment = load(reference, ENVIRONMENT_KEY)
    if not isinstance(environment, type):
        raise UserError(f"{ENVIRONMENT_KEY}: {reference} is not a class; name one with `stop` and `reply(self, turn)`")
    check_call(environment, ("problem",), rollout.environment_args, ENVIRONMENT_KEY)
    reply = getattr(environment, "reply", None)
    if not callable(reply):
        raise UserError(f"{ENVIRONMENT_KEY}: {environment.__name__} has no method `reply(self, turn)`; add one")
    is_static = isinstance(inspect.getattr_static(environment, "reply"), staticmethod | classmethod)
    check_call(reply, ("turn",) if is_static else ("self", "turn"), {}, ENVIRONMENT_KEY)
    return EnvironmentClass(reference, environment, from_environment(rollout.environment_args, "rollout.environment_args"))


class Instance:
    """The environment of one response. Every method may be cancelled, and raises EnvironmentFailure if the user's code fails."""

    def __init__(self, environment_class: EnvironmentClass, problem: object, loops: UserLoops) -> None:
        self._class, self._problem, self._loops = environment_class, problem, loops
        self._executor: UserThread | UserLoop | None = None
        self._object: object = None
        self.stop: list[str] = []

    async def create(self) -> None:
        """Create the object, and read its `stop`."""

        def create() -> object:
            # The thread itself stores the object, so that it is closed even if the caller was cancelled.
            self._object = self._class.make(self._problem, **self._class.args)
            return getattr(self._object, "stop", None)

        self._executor = self._loops.current() if self._class.is_async else UserThread()
        stop = await self._call(create)
        if stop is None:
            raise EnvironmentFailure(f"{self._class.location_of('stop')} is missing; name the texts that end a turn, or none: stop = []")
        if isinstance(stop, str) or not isinstance(stop, Sequence) or not all(isinstance(text, str) and text for text in stop):
            raise EnvironmentFailure(f"{self._class.location_of('stop')} must be a list of texts, got {_short_repr(stop)}")
        self.stop = list(stop)

    async def reply(self, turn: str) -> Reply:
        """Call `reply(turn)`, and check that the result is text or chat messages."""
        reply = await self._call(lambda: self._method("reply")(turn))
        location = self._class.location_of("reply")
        if reply is None:
            return None
        if isinstance(reply, str):
            _check_text(reply, location)
            return reply
        if not isinstance(reply, list | tuple):
            raise EnvironmentFailure(
                f"{location} returned {type(reply).__name__}: {_short_repr(reply)}; return text, chat messages or None"
            )
        for message in reply:
            if not isinstance(message, Mapping) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
                raise EnvironmentFailure(
                    f"{location} returned a list of {_short_repr(message)}; a message has `role` and `content`, both text"
                )
            _check_text(str(message["content"]), location)
        return list(reply)

    async def reward(self) -> float | None:
        """Call `reward()`. Returns None if it is not defined or returns None."""
        if not self.has("reward"):
            return None
        value = await self._call(lambda: self._method("reward")())
        if value is None:
            return None
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise EnvironmentFailure(f"{self._class.location_of('reward')} returned {_short_repr(value)}; return a finite number, or None")
        return float(value)

    async def tools(self) -> list[object]:
        """Call `tools()`. Returns an empty list if it is not defined."""
        if not self.has("tools"):
            return []
        tools = await self._call(lambda: self._method("tools")())
        if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
            raise EnvironmentFailure(f"{self._class.location_of('tools')} returned {_short_repr(tools)}; return a list of JSON schemas")
        return list(tools)

    async def close(self) -> None:
        """Call `close()` if it is defined, even while another method is running. Then end the thread."""
        executor = self._executor
        if executor is None:
            return
        if isinstance(executor, UserThread) and executor.busy and self._object is not None:
            # A method that does not return would block `close`, although `close` may be required to end it.
            await asyncio.sleep(0.1)
            if executor.busy:
                executor.end()
                self._executor = executor = UserThread()
        try:
            await self._call(lambda: self._method("close")() if self.has("close") else None)
        finally:
            if isinstance(executor, UserThread):
                executor.end()

    def has(self, method: str) -> bool:
        """Whether the environment defines this optional method."""
        return callable(getattr(self._object, method, None))

    def _method(self, name: str) -> Callable[..., object]:
        method: Callable[..., object] = getattr(self._object, name)
        return method

    async def _call(self, method: Callable[[], object]) -> object:
        assert self._executor is not None, "`create` is called first"
        try:
            value = await self._executor.call(method)
            if inspect.isawaitable(value):  # a coroutine among plain methods
                value = await self._loops.current().call(lambda: value)
        except UserCodeError as error:
            line = " ".join(describe_error(error.cause, self._class.reference).split())
            raise EnvironmentFailure(line[:MAX_ERROR_LENGTH]) from error.cause
        return value


class Failures:
    """Selects the failures to report: the first from each location in the user's code."""

    def __init__(self) -> None:
        self._reported: set[str] = set()

    def unreported(self, sample: Sample) -> str | None:
        """The sample's failure in one line, unless one from the same location was reported."""
        failure = "" if sample.environment is None else sample.environment.failure
        location = " ".join(failure.split()[:2])
        if not failure or location in self._reported:
            return None
        self._reported.add(location)
        return f"{ENVIRONMENT_KEY}: {failure}; the response ended there (environment/errors counts them)"


def _short_repr(value: object) -> str:
    return " ".join(repr(value).split())[:60]


def _check_text(text: str, location: str) -> None:
    if len(text) > MAX_REPLY_LENGTH:
        raise EnvironmentFailure(f"{location} returned {len(text):,} characters; return at most {MAX_REPLY_LENGTH:,}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EnvironmentFailure(f"{location} returned text that is not UTF-8 ({error.reason}); replace what cannot be encoded") from error


HEARTBEAT_S = 0.25
MAX_HEARTBEAT_AGE_S = 5.0
"""Seconds without a heartbeat after which an event loop counts as blocked by a coroutine."""

Job = Callable[[], object]


class UserCodeError(Exception):
    """The method raised `cause`, which may be a BaseException such as SystemExit."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class UserThread:
    """Runs plain method calls sequentially in one thread. `busy`: a call has not returned yet."""

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
        """Call a method. Raises UserCodeError. If the caller is cancelled, the method continues."""
        loop = asyncio.get_running_loop()
        outcome_future: asyncio.Future[tuple[object, BaseException | None]] = loop.create_future()

        def set_result(value: object, error: BaseException | None) -> None:
            if not outcome_future.done():
                outcome_future.set_result((value, error))

        def job() -> None:
            value, error = _call_safely(method)
            with suppress(RuntimeError):  # the caller's loop is closed
                loop.call_soon_threadsafe(set_result, value, error)

        self._jobs.put(job)
        value, error = await outcome_future
        if error is not None:
            raise UserCodeError(error)
        return value

    def end(self) -> None:
        """End the thread after the queued calls."""
        self._jobs.put(None)


class UserLoop:
    """An event loop in a separate thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._last_heartbeat = time.monotonic()
        self._loop.call_soon(self._heartbeat)
        Thread(target=self._loop.run_forever, daemon=True, name="environments").start()

    def _heartbeat(self) -> None:
        self._last_heartbeat = time.monotonic()
        self._loop.call_later(HEARTBEAT_S, self._heartbeat)

    @property
    def blocked(self) -> bool:
        return time.monotonic() - self._last_heartbeat > MAX_HEARTBEAT_AGE_S

    async def call(self, method: Job) -> object:
        """Call a method, and await its coroutine. Raises UserCodeError. Cancelling the caller cancels the coroutine."""

        async def run() -> tuple[object, BaseException | None]:
            value, error = _call_safely(method)
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
            # The coroutine cancelled itself; the caller was not cancelled.
            raise UserCodeError(cancelled) from cancelled
        if error is not None:
            raise UserCodeError(error)
        return value

    def end(self) -> None:
        """Stop the loop as soon as no coroutine blocks it."""
        self._loop.call_soon_threadsafe(self._loop.stop)


class UserLoops:
    """Provides new environments with an event loop that is not blocked."""

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


def _call_safely(method: Job) -> tuple[object, BaseException | None]:
    try:
        return method(), None
    except BaseException as error:  # also SystemExit, which would end the thread
        return None, error
