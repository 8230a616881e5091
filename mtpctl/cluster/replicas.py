"""Replicas in their seats: who is there, who died of what, who is being started again, and who is given up.

The rollout pool and the log-prob server both stand on this. Which work goes to whom is theirs; what a replica is, how it is
started, brought up to date and ended, they say in a `Lifecycle`. Nothing that must not be lost is kept in a replica, so one
that dies is taken out, ended for good, and another one started in its seat.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

from mtpctl.cluster.deadlines import one_line
from mtpctl.errors import RuntimeFailure

KEPT_S = 60.0
"""Seconds, those of updates not counted, in which what the others serve can be had: a pushed version reaches the store after it is live."""
FORGET_S = 3600.0
"""Seconds after which a failure is forgotten: a run goes on for weeks, and what fails now and then does not fail again and again."""
_LOOK_S = 0.02


@dataclass(frozen=True)
class Lifecycle[R]:
    """What to do with a replica of type R.

    start: a fresh one for the seat of this number. bring_up: have a fresh one take in what the others serve, called while no update is
    under way, and within `bring_up_s` seconds, since updates wait for it; False where that cannot be had yet. end: end it, whatever is
    left of it; after `end_s` seconds it is cancelled, and leaves nothing behind even so. changed: called when a seat was filled or given
    up. dead: errors that say that a replica is gone. max_restarts: failures of a seat within `FORGET_S` beyond which it is given up.
    """

    start: Callable[[int], Awaitable[R]]
    bring_up: Callable[[R], Awaitable[bool]]
    end: Callable[[R], Awaitable[None]]
    changed: Callable[[], Awaitable[None]]
    dead: tuple[type[Exception], ...]
    max_restarts: int
    end_s: float
    bring_up_s: float


@dataclass(slots=True)
class Seat[R]:
    """One replica's place; `replica` is None while it is down.

    busy: pieces of work that its owner gave it and awaits. failed_at: when it failed, on the clock of `time.monotonic`, as far as that
    is not forgotten. fills: replicas that came after the first.
    """

    index: int
    replica: R | None
    busy: int = 0
    failed_at: list[float] = field(default_factory=list)
    reason: str = ""
    quarantined: bool = False
    fills: int = 0
    restarting: asyncio.Task[None] | None = None

    @property
    def state(self) -> Literal["serving", "restarting", "quarantined"]:
        """What is in the seat."""
        return "serving" if self.replica is not None else "quarantined" if self.quarantined else "restarting"


async def start_all[R](start: Callable[[int], Awaitable[R]], end: Callable[[R], Awaitable[None]], count: int) -> list[R]:
    """`count` replicas, started at once. Where one does not start, the others are ended and its error is raised."""
    tasks = [asyncio.ensure_future(start(index)) for index in range(count)]
    await asyncio.gather(*tasks, return_exceptions=True)
    failed = [error for task in tasks if (error := task.exception()) is not None]
    if failed:
        await asyncio.gather(*(end(task.result()) for task in tasks if task.exception() is None), return_exceptions=True)
        raise failed[0]
    return [task.result() for task in tasks]


class Replicas[R]:
    """The seats, and the restarts going on in them. `updating` is held while all change together, and while one is brought up.

    They change together in a block of `standing`. Where what they take in is sent to named receivers, `members` names those that are
    there, and `take_in` asks these very ones, also one that has died since: its answer tells the others not to wait for it.
    """

    def __init__(self, replicas: list[R], lifecycle: Lifecycle[R]) -> None:
        self.seats = [Seat(index, replica) for index, replica in enumerate(replicas)]
        self.updating = asyncio.Lock()
        self.restarts = 0
        self._lifecycle = lifecycle
        self._closed = False
        self._named: list[tuple[Seat[R], R]] | None = None

    def live(self, where: Callable[[R], bool] = lambda _: True) -> list[tuple[Seat[R], R]]:
        """Seats with a replica that serves and for which `where` holds."""
        return [(seat, seat.replica) for seat in self.seats if seat.replica is not None and where(seat.replica)]

    def hopeless(self) -> str:
        """Why nothing will ever serve again, seat by seat; empty while something may."""
        if not all(seat.quarantined for seat in self.seats):
            return ""
        return "; ".join(f"{seat.index}: {seat.reason}" for seat in self.seats)

    def lost(self, seat: Seat[R], replica: R, error: Exception) -> None:
        """Take a failed replica out, once, however many of its callers noticed, and have another one started."""
        if seat.replica is not replica or self._closed:
            return
        seat.replica = None
        self._failed(seat, error)
        seat.restarting = asyncio.create_task(self._restart(seat, replica))

    @asynccontextmanager
    async def standing(self) -> AsyncIterator[None]:
        """No replica comes while the block runs."""
        async with self.updating:
            self._named = None
            yield

    def members(self, kind: str, ranks: int, where: Callable[[R], bool] = lambda _: True) -> list[str]:
        """A name for each rank of each live replica for which `where` holds, of `ranks` each; never given again.

        Whoever is named in a block of `standing` is whom its next `take_in` asks.
        """
        self._named = self.live(where)
        return [f"{kind} {seat.index}.{seat.fills}.{rank}" for seat, _ in self._named for rank in range(ranks)]

    async def take_in[T](self, call: Callable[[R], Awaitable[T]], where: Callable[[R], bool] = lambda _: True) -> list[T]:
        """The answers of those that `members` named, or where it was not asked of the live replicas for which `where` holds. See `each`."""
        assert self.updating.locked(), "replicas change in a block of `standing`"
        asked, self._named = self._named, None
        return await self._ask(self.live(where) if asked is None else asked, call)

    async def each[T](self, call: Callable[[R], Awaitable[T]]) -> list[T]:
        """The answers of the live replicas, asked at once; one that turns out dead is restarted.

        Raises the first other error, after every replica has answered.
        """
        return await self._ask(self.live(), call)

    async def _ask[T](self, asked: list[tuple[Seat[R], R]], call: Callable[[R], Awaitable[T]]) -> list[T]:
        answers: list[T] = []
        refused: list[BaseException] = []
        found = await asyncio.gather(*(call(replica) for _, replica in asked), return_exceptions=True)
        for (seat, replica), answer in zip(asked, found, strict=True):
            if isinstance(answer, self._lifecycle.dead):
                self.lost(seat, replica, answer)
            elif isinstance(answer, BaseException):
                refused.append(answer)
            else:
                answers.append(answer)
        if refused:
            raise refused[0]
        return answers

    async def close(self) -> None:
        """Start none any more, and end every replica, also those that are on their way out or in."""
        self._closed = True
        restarting = [seat.restarting for seat in self.seats if seat.restarting is not None]
        for task in restarting:
            task.cancel()
        ended = await asyncio.gather(*(self._end(replica) for _, replica in self.live()), return_exceptions=True)
        await asyncio.gather(*restarting, return_exceptions=True)
        for result in ended:
            if isinstance(result, BaseException) and not isinstance(result, (*self._lifecycle.dead, TimeoutError)):
                raise result

    async def _end(self, replica: R) -> None:
        await asyncio.wait_for(self._lifecycle.end(replica), self._lifecycle.end_s)

    async def _restart(self, seat: Seat[R], dead: R) -> None:
        with suppress(Exception):
            # Whatever is left of it: it failed already, and why is kept as the seat's reason.
            await self._end(dead)
        while len(seat.failed_at) <= self._lifecycle.max_restarts:
            try:
                await self._fill(seat)
                break
            except Exception as error:
                self._failed(seat, error)
        else:
            seat.quarantined = True
        await self._lifecycle.changed()

    async def _fill(self, seat: Seat[R]) -> None:
        fresh = await self._lifecycle.start(seat.index)
        try:
            waited = 0.0
            while not await self._brought_up(seat, fresh):
                if waited > KEPT_S:
                    raise RuntimeFailure(f"what the others serve could not be had within {KEPT_S:g} s")
                # Without the lock: the version may come with the next update, which is the last one's second try.
                await asyncio.sleep(_LOOK_S)
                waited += _LOOK_S
        except BaseException:
            with suppress(*self._lifecycle.dead, TimeoutError):
                await self._end(fresh)
            raise
        self.restarts += 1

    async def _brought_up(self, seat: Seat[R], fresh: R) -> bool:
        async with self.updating:
            within = self._lifecycle.bring_up_s
            try:
                brought_up = await asyncio.wait_for(self._lifecycle.bring_up(fresh), within)
            except TimeoutError as error:
                raise RuntimeFailure(f"it did not take in what the others serve within {within:g} s") from error
            if not brought_up:
                return False
            seat.replica = fresh
            seat.fills += 1
            return True

    def _failed(self, seat: Seat[R], error: Exception) -> None:
        now = time.monotonic()
        seat.failed_at = [*(then for then in seat.failed_at if now - then < FORGET_S), now]
        seat.reason = one_line(error)
