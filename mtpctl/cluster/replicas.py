"""Supervision of replicas: which serve, which are being restarted, and which have failed too often.

The rollout pool and the log-prob server use it: they give replicas their work, and say in a `Lifecycle` how a replica is started, updated
to the weights of the others, and ended. A replica that fails is ended and another one is started in its seat, so it must hold nothing that
may not be lost. A replica may also be asked to leave, which is no failure, and another one may join in its seat, or in a new one.
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

VERSION_WAIT_S = 60.0
"""Seconds, without those of updates, that a fresh replica waits until the version of the others is persisted."""
FORGET_S = 3600.0
"""Seconds after which a failure no longer counts against `max_restarts`: in a run of weeks a replica may fail now and then."""
_POLL_S = 0.02

Tell = Callable[[str], None]
"""Takes a line about replicas that failed or are back, for the log of a run."""


def tell_nobody(line: str) -> None:
    """A `Tell` for callers that keep no log: drops the line."""


@dataclass(frozen=True)
class Lifecycle[R]:
    """How replicas of type R are started, updated and ended.

    start: start a replica for the seat of this index. bring_up: update a fresh replica to the version of the others; returns False where
    that version cannot be had yet. It is called while no update is under way, and has `bring_up_s` seconds, since updates wait for it.
    end: end a replica that may have failed; it is cancelled after `end_s` seconds, and must leave nothing behind even then. changed:
    called when a seat was filled, left or quarantined. dead: exceptions that mean that a replica is gone. max_restarts: a seat that fails
    more often within `FORGET_S` is quarantined. tell: is told of failures, and what became of the seat, in one line each.
    """

    start: Callable[[int], Awaitable[R]]
    bring_up: Callable[[R], Awaitable[bool]]
    end: Callable[[R], Awaitable[None]]
    changed: Callable[[], Awaitable[None]]
    dead: tuple[type[Exception], ...]
    max_restarts: int
    end_s: float
    bring_up_s: float
    tell: Tell = tell_nobody


@dataclass(slots=True)
class Seat[R]:
    """The place of one replica; `replica` is None while none serves there.

    wanted: whether a replica is to be there. A replica that was asked to leave still takes part in updates until it has left, but gets no
    further work.
    busy: requests under way, counted by the owner of the seats. failed_at: times of the failures within `FORGET_S`, on the clock of
    `time.monotonic`. fills: how many replicas came after the first.
    """

    index: int
    replica: R | None
    busy: int = 0
    failed_at: list[float] = field(default_factory=list)
    reason: str = ""
    quarantined: bool = False
    fills: int = 0
    restarting: asyncio.Task[None] | None = None
    wanted: bool = True

    @property
    def state(self) -> Literal["serving", "restarting", "quarantined", "vacant"]:
        """Whether a replica serves in the seat, is being started, failed too often, or is not wanted there."""
        if not self.wanted:
            return "vacant"
        return "serving" if self.replica is not None else "quarantined" if self.quarantined else "restarting"


async def start_all[R](
    start: Callable[[int], Awaitable[R]],
    end: Callable[[R], Awaitable[None]],
    count: int,
    *,
    dead: tuple[type[Exception], ...] = (),
    max_restarts: int = 0,
) -> list[R]:
    """Start `count` replicas at the same time. One that is found `dead` meanwhile is started again, `max_restarts` times.

    Where one does not start, end the others and raise its error.
    """

    async def one(index: int) -> R:
        for _ in range(max_restarts):
            with suppress(*dead):
                return await start(index)
        return await start(index)

    tasks = [asyncio.ensure_future(one(index)) for index in range(count)]
    await asyncio.gather(*tasks, return_exceptions=True)
    failed = [error for task in tasks if (error := task.exception()) is not None]
    if failed:
        await asyncio.gather(*(end(task.result()) for task in tasks if task.exception() is None), return_exceptions=True)
        raise failed[0]
    return [task.result() for task in tasks]


class Replicas[R]:
    """The seats, and the restarts under way in them. `updating` is locked during an update, and while a fresh replica is brought up.

    An update runs in a block of `fixed_members`. Where its weights are pushed to named receivers, `members` names the ranks of the live
    replicas, and `apply_update` calls exactly these replicas, including one that has died meanwhile: its error releases the others, which
    would wait for it in the transfer.
    """

    def __init__(self, replicas: list[R], lifecycle: Lifecycle[R]) -> None:
        self.seats = [Seat(index, replica) for index, replica in enumerate(replicas)]
        self.updating = asyncio.Lock()
        self.restarts = 0
        self._lifecycle = lifecycle
        self._closed = False
        self._named: list[tuple[Seat[R], R]] | None = None

    def live(self, where: Callable[[R], bool] = lambda _: True) -> list[tuple[Seat[R], R]]:
        """The replicas that serve and for which `where` holds, with their seats."""
        return [(seat, seat.replica) for seat in self.seats if seat.replica is not None and where(seat.replica)]

    def hopeless(self) -> str:
        """The reason of each seat where all that are wanted are quarantined, so that nothing will serve again; else empty."""
        wanted = [seat for seat in self.seats if seat.wanted]
        if not all(seat.quarantined for seat in wanted):
            return ""
        return "; ".join(f"{seat.index}: {seat.reason}" for seat in wanted)

    def lost(self, seat: Seat[R], replica: R, error: Exception) -> None:
        """Restart a replica that failed. Further reports of the same replica do nothing."""
        if seat.replica is not replica or self._closed:
            return
        seat.replica = None
        if seat.wanted:  # `leave` ends one that was asked to.
            self._failed(seat, error)
            seat.restarting = asyncio.create_task(self._restart(seat, replica))

    def join(self, index: int) -> None:
        """Have a replica start in a seat, which is vacant or the next new one. Earlier failures of the seat are forgotten."""
        assert not self._closed and index <= len(self.seats)
        if index == len(self.seats):
            self.seats.append(Seat(index, None, wanted=False))
        seat = self.seats[index]
        assert seat.state == "vacant" and seat.replica is None
        seat.wanted, seat.quarantined, seat.failed_at, seat.reason = True, False, [], ""
        seat.restarting = asyncio.create_task(self._fill_or_give_up(seat))

    async def leave(self, index: int, hand_over: Callable[[Seat[R], R], Awaitable[None]]) -> None:
        """Vacate a seat, whether a replica serves there, is being started or was quarantined. This is no failure.

        A replica that serves gets no further work from now on. It takes part in an update that is under way; then `hand_over` has it give
        back the work that it still has, and it is ended.
        """
        seat = self.seats[index]
        seat.wanted = False
        if seat.restarting is not None and not seat.restarting.done():
            seat.restarting.cancel()
            await asyncio.gather(seat.restarting, return_exceptions=True)
        leaving = seat.replica
        async with self.updating:
            seat.replica = None
        try:
            if leaving is not None:
                with suppress(*self._lifecycle.dead, TimeoutError):
                    await hand_over(seat, leaving)
        finally:
            if leaving is not None:
                with suppress(*self._lifecycle.dead, TimeoutError):
                    await self._end(leaving)
        await self._lifecycle.changed()

    @asynccontextmanager
    async def fixed_members(self) -> AsyncIterator[None]:
        """Let no fresh replica begin to serve while the block runs."""
        async with self.updating:
            self._named = None
            yield

    def members(self, kind: str, ranks: int, where: Callable[[R], bool] = lambda _: True) -> list[str]:
        """A name for each of the `ranks` of each live replica for which `where` holds. No name is used twice.

        The next `apply_update` of the same `fixed_members` block calls exactly these replicas.
        """
        self._named = self.live(where)
        return [f"{kind} {seat.index}.{seat.fills}.{rank}" for seat, _ in self._named for rank in range(ranks)]

    async def apply_update[T](self, call: Callable[[R], Awaitable[T]], where: Callable[[R], bool] = lambda _: True) -> list[T]:
        """`call` the replicas that `members` named, or where it was not called the live ones for which `where` holds, as `each` does."""
        assert self.updating.locked(), "replicas are updated in a block of `fixed_members`"
        asked, self._named = self._named, None
        return await self._ask(self.live(where) if asked is None else asked, call)

    async def each[T](self, call: Callable[[R], Awaitable[T]]) -> list[T]:
        """`call` all live replicas at the same time and return their answers. A replica that turns out dead is restarted.

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
        """End all replicas, including those that are being started or ended, and start no more."""
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
            # Errors of ending it do not matter: it has failed, for the reason that the seat has.
            await self._end(dead)
        await self._fill_or_give_up(seat, anew=True)

    async def _fill_or_give_up(self, seat: Seat[R], *, anew: bool = False) -> None:
        """Start replicas for a seat until one serves, or quarantine it after too many failures. `anew`: in the place of one that failed."""
        while len(seat.failed_at) <= self._lifecycle.max_restarts:
            try:
                await self._fill(seat)
                if anew:
                    self.restarts += 1
                    self._lifecycle.tell(f"replica {seat.index} is back")
                break
            except Exception as error:
                self._failed(seat, error)
        else:
            seat.quarantined = True
            self._lifecycle.tell(f"replica {seat.index} is in quarantine: it failed {len(seat.failed_at)} time(s) within an hour")
        await self._lifecycle.changed()

    async def _fill(self, seat: Seat[R]) -> None:
        fresh = await self._lifecycle.start(seat.index)
        try:
            waited = 0.0
            while not await self._brought_up(seat, fresh):
                if waited > VERSION_WAIT_S:
                    raise RuntimeFailure(f"what the others serve could not be had within {VERSION_WAIT_S:g} s")
                # Without the lock: the version may come with the next update, such as the second try of one that failed.
                await asyncio.sleep(_POLL_S)
                waited += _POLL_S
        except BaseException:
            with suppress(*self._lifecycle.dead, TimeoutError):
                await self._end(fresh)
            raise

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
        self._lifecycle.tell(f"replica {seat.index} failed: {seat.reason}")
