"""Environments: what replies to the model between the turns of a response, such as a tool, a game or a simulated user.

An environment is a class of mtpctl's or of the user's own. Each response has an instance of its own, which is made with the problem and
`rollout.environment_args`, and is closed when the response ends, however it ends.
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

FIELD = "rollout.environment"
LONGEST_REPLY = 1_000_000
"""Characters that one reply may have. It is tokenised as a whole, and no context holds as many."""
LONGEST_MESSAGE = 500
"""Characters of an error of the user's code that are told."""
CLOSE_S = 10.0
"""Seconds that `close` may take, and `reward` where the response's deadline is over already."""

Message = Mapping[str, object]
"""A message of a chat template: `role` and `content`, both text, and whatever else the template knows."""
Reply = str | list[Message] | None


class Environment(Protocol):
    """What a user's class has. Any of its methods may be a coroutine function; whether `reply` is one decides where all of them run.

    `stop`: texts that end a turn of the model; without any, the model's end token ends it. Optional methods: `reward() -> float` when the
    response has ended, `tools() -> list` of JSON schemas for the chat template, and `close()`.
    """

    stop: Sequence[str]

    def reply(self, turn: str) -> Reply:
        """What to append after the model's turn `turn`, which ends with one of `stop`. None, or nothing, ends the response."""
        ...


class EnvironmentFailure(Exception):
    """A user's environment raised, or returned what it must not; the message is one line with its file and line."""


@dataclass(frozen=True, slots=True)
class EnvironmentClass:
    """A class that the recipe names, as `reference`, and the keyword arguments that its instances are made with."""

    reference: str
    make: type
    args: Mapping[str, object]

    @property
    def is_async(self) -> bool:
        """Whether its methods run on an event loop, and not in a thread for each response."""
        return inspect.iscoroutinefunction(getattr(self.make, "reply", None))

    def where(self, method: str) -> str:
        """`tool.py:12: Echo.reply`: the place of a method or of `stop`, for messages."""
        found = getattr(self.make, method, None)
        code = getattr(inspect.unwrap(found if callable(found) else inspect.getattr_static(self.make, "__init__")), "__code__", None)
        place = "" if code is None else f"{Path(code.co_filename).name}:{code.co_firstlineno}: "
        return f"{place}{self.make.__name__}.{method}"


def environment_of(rollout: RolloutBase) -> EnvironmentClass | None:
    """The recipe's environment, None where a response is a single turn or an agent's.

    Raises UserError for a file, module or name that is missing, and for a class that cannot be made or has no `reply`.
    """
    if rollout.environment == "single" or rollout.agents_play:
        return None
    reference = ENVIRONMENTS.get(rollout.environment, rollout.environment)
    made = load(reference, FIELD)
    if not isinstance(made, type):
        raise UserError(f"{FIELD}: {reference} is no class; name one with `stop` and `reply(self, turn)`")
    check_call(made, ("problem",), rollout.environment_args, FIELD)
    reply = getattr(made, "reply", None)
    if not callable(reply):
        raise UserError(f"{FIELD}: {made.__name__} has no method `reply(self, turn)`; add one")
    static = isinstance(inspect.getattr_static(made, "reply"), staticmethod | classmethod)
    check_call(reply, ("turn",) if static else ("self", "turn"), {}, FIELD)
    return EnvironmentClass(reference, made, from_environment(rollout.environment_args, "rollout.environment_args"))


class Instance:
    """One response's environment. Every method raises EnvironmentFailure where the user's code fails; waiting may be given up anywhere."""

    def __init__(self, of: EnvironmentClass, problem: object, loops: UserLoops) -> None:
        self._of, self._problem, self._loops = of, problem, loops
        self._runs: UserThread | UserLoop | None = None
        self._made: object = None
        self.stop: list[str] = []

    async def make(self) -> None:
        """Make the object, and read its `stop`."""

        def make() -> object:
            # Kept by the thread that makes it, so that it is closed also where nobody waits for it any more.
            self._made = self._of.make(self._problem, **self._of.args)
            return getattr(self._made, "stop", None)

        self._runs = self._loops.current() if self._of.is_async else UserThread()
        stop = await self._call(make)
        if stop is None:
            raise EnvironmentFailure(f"{self._of.where('stop')} is missing; name the texts that end a turn, or none: stop = []")
        if isinstance(stop, str) or not isinstance(stop, Sequence) or not all(isinstance(each, str) and each for each in stop):
            raise EnvironmentFailure(f"{self._of.where('stop')} must be a list of texts, got {_shown(stop)}")
        self.stop = list(stop)

    async def reply(self, turn: str) -> Reply:
        """The environment's answer, which has been checked to be text or chat messages."""
        said = await self._call(lambda: self._method("reply")(turn))
        where = self._of.where("reply")
        if said is None:
            return None
        if isinstance(said, str):
            _check_text(said, where)
            return said
        if not isinstance(said, list | tuple):
            raise EnvironmentFailure(f"{where} returned {type(said).__name__}: {_shown(said)}; return text, chat messages or None")
        for message in said:
            if not isinstance(message, Mapping) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
                raise EnvironmentFailure(f"{where} returned a list of {_shown(message)}; a message has `role` and `content`, both text")
            _check_text(str(message["content"]), where)
        return list(said)

    async def reward(self) -> float | None:
        """What `reward()` returns; None where there is none, or where it returns None."""
        if not self.has("reward"):
            return None
        value = await self._call(lambda: self._method("reward")())
        if value is None:
            return None
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise EnvironmentFailure(f"{self._of.where('reward')} returned {_shown(value)}; return a finite number, or None")
        return float(value)

    async def tools(self) -> list[object]:
        """What `tools()` returns; none where it is not there."""
        if not self.has("tools"):
            return []
        tools = await self._call(lambda: self._method("tools")())
        if not isinstance(tools, list | tuple) or not all(isinstance(each, Mapping) for each in tools):
            raise EnvironmentFailure(f"{self._of.where('tools')} returned {_shown(tools)}; return a list of JSON schemas")
        return list(tools)

    async def close(self) -> None:
        """Call `close()` where there is one, also when another method is still running, and end the thread."""
        runs = self._runs
        if runs is None:
            return
        if isinstance(runs, UserThread) and runs.busy and self._made is not None:
            # A method that does not return would keep `close` waiting, which may be what ends it.
            await asyncio.sleep(0.1)
            if runs.busy:
                runs.end()
                self._runs = runs = UserThread()
        try:
            await self._call(lambda: self._method("close")() if self.has("close") else None)
        finally:
            if isinstance(runs, UserThread):
                runs.end()

    def has(self, method: str) -> bool:
        """Whether the environment defines this optional method."""
        return callable(getattr(self._made, method, None))

    def _method(self, name: str) -> Callable[..., object]:
        method: Callable[..., object] = getattr(self._made, name)
        return method

    async def _call(self, method: Callable[[], object]) -> object:
        assert self._runs is not None, "made first"
        try:
            value = await self._runs.call(method)
            if inspect.isawaitable(value):  # a coroutine among plain methods
                value = await self._loops.current().call(lambda: value)
        except MethodRaised as raised:
            line = " ".join(describe_error(raised.cause, self._of.reference).split())
            raise EnvironmentFailure(line[:LONGEST_MESSAGE]) from raised.cause
        return value


class Failures:
    """Picks from the failures in samples those to tell: the first from each place in the user's code."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def first(self, sample: Sample) -> str | None:
        """The sample's failure in one line, if it is the first of its place."""
        failure = "" if sample.environment is None else sample.environment.failure
        place = " ".join(failure.split()[:2])
        if not failure or place in self._told:
            return None
        self._told.add(place)
        return f"{FIELD}: {failure}; the response ended there (environment/errors counts them)"


def _shown(value: object) -> str:
    return " ".join(repr(value).split())[:60]


def _check_text(text: str, where: str) -> None:
    if len(text) > LONGEST_REPLY:
        raise EnvironmentFailure(f"{where} returned {len(text):,} characters; return at most {LONGEST_REPLY:,}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EnvironmentFailure(f"{where} returned text that is not UTF-8 ({error.reason}); replace what cannot be encoded") from error


# Calls of a user's own methods, from an event loop that must not stop for them.
#
# Plain methods run in daemon threads and coroutines on an event loop in a thread of its own, so a method that blocks holds up neither the
# loop that called nor, at the end, the process. Whatever a method raises is an exception of the call, and never ends thread or loop.

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
