"""Supervision of replicas: restarts replicas that fail, quarantines slots that fail too often, and lets replicas join and leave.

The rollout pool and the log-prob server use it. They dispatch the work, and define in a `Lifecycle` how a replica is started, updated to
the weights of the others, and ended. A failed replica is ended and replaced in its slot, so a replica must not hold state that cannot be
lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

from mtpctl.cluster.deadlines import describe_error
from mtpctl.errors import RuntimeFailure

VERSION_WAIT_S = 60.0
"""Maximum wait of a new replica until the version of the others is persisted, in seconds, excluding the time of updates."""
FAILURE_WINDOW_S = 3600.0
"""Seconds after which a failure no longer counts against `max_restarts`, so that rare failures do not add up in a long run."""
_POLL_S = 0.02

Log = Callable[[str], None]
"""Logs a line about replicas that failed or were restarted."""


def no_log(line: str) -> None:
    """A `Log` that drops the line."""


@dataclass(frozen=True)
class Lifecycle[R]:
    """How replicas of type R are started, updated and ended.

    Attributes:
        start: starts a replica for the slot of this index.
        catch_up: loads the weight version of the others into a new replica. Returns False if that version is not persisted yet. Updates
            wait for it, so it is cancelled after `catch_up_timeout_s` seconds.
        end: ends a replica that may have failed. It is cancelled after `end_timeout_s` seconds, and even then must leave no processes.
        on_change: called after a slot was filled, vacated or quarantined.
        fatal_errors: exceptions after which a replica is replaced.
        max_restarts: a slot with more failures within `FAILURE_WINDOW_S` is quarantined.
        log: receives failures, restarts and quarantines, one line each.
    """

    start: Callable[[int], Awaitable[R]]
    catch_up: Callable[[R], Awaitable[bool]]
    end: Callable[[R], Awaitable[None]]
    on_change: Callable[[], None]
    fatal_errors: tuple[type[Exception], ...]
    max_restarts: int
    end_timeout_s: float
    catch_up_timeout_s: float
    log: Log = no_log


@dataclass(slots=True)
class Slot[R]:
    """The slot of one replica; `replica` is None while none serves in it.

    Attributes:
        num_requests: requests in progress, counted by the owner.
        failure_times: times of the failures within `FAILURE_WINDOW_S` (`time.monotonic`).
        reason: the last failure.
        num_starts: number of replicas that have joined in the slot; an initial replica is not counted.
        is_occupied: False if the slot is vacant or its replica is leaving. A leaving replica gets no further work, but is still updated.
    """

    index: int
    replica: R | None
    num_requests: int = 0
    failure_times: list[float] = field(default_factory=list)
    reason: str = ""
    is_quarantined: bool = False
    num_starts: int = 0
    restart_task: asyncio.Task[None] | None = None
    is_occupied: bool = True

    @property
    def state(self) -> Literal["serving", "restarting", "quarantined", "vacant"]:
        """The state of the slot; "vacant" if it is not occupied."""
        if not self.is_occupied:
            return "vacant"
        return "serving" if self.replica is not None else "quarantined" if self.is_quarantined else "restarting"


async def start_all[R](
    start: Callable[[int], Awaitable[R]],
    end: Callable[[R], Awaitable[None]],
    count: int,
    *,
    fatal_errors: tuple[type[Exception], ...] = (),
    max_restarts: int = 0,
) -> list[R]:
    """Start `count` replicas concurrently. A start that fails with `fatal_errors` is repeated up to `max_restarts` times.

    If a replica does not start, the others are ended and its error is raised.
    """

    async def start_with_retries(index: int) -> R:
        for _ in range(max_restarts):
            with suppress(*fatal_errors):
                return await start(index)
        return await start(index)

    tasks = [asyncio.ensure_future(start_with_retries(index)) for index in range(count)]

    async def end_started() -> None:
        started = [task.result() for task in tasks if not task.cancelled() and task.exception() is None]
        await asyncio.gather(*map(end, started), return_exceptions=True)

    try:
        await asyncio.gather(*tasks, return_exceptions=True)
    except asyncio.CancelledError:  # `gather` has cancelled the tasks that were not done
        await asyncio.gather(*tasks, return_exceptions=True)
        await end_started()
        raise
    errors = [error for task in tasks if (error := task.exception()) is not None]
    if errors:
        await end_started()
        raise errors[0]
    return [task.result() for task in tasks]


class Replicas[R]:
    """The slots and their restarts. `updating` is locked during an update, and while a new replica catches up.

    An update runs in a block of `fixed_members`. If its weights are pushed to named receivers, `rank_names` names the ranks of the live
    replicas, and `apply_update` calls exactly these replicas, even if some died in between: the live ones wait for every member of the
    transfer, and only the error of the call to a dead one releases them.
    """

    def __init__(self, replicas: list[R], lifecycle: Lifecycle[R]) -> None:
        self.slots = [Slot(index, replica) for index, replica in enumerate(replicas)]
        self.updating = asyncio.Lock()
        self.num_restarts = 0
        self._lifecycle = lifecycle
        self._closed = False
        # Tasks that end failed replicas, apart from the restarts of their slots, which may be cancelled before they begin.
        self._ending: set[asyncio.Task[None]] = set()
        self._update_members: list[tuple[Slot[R], R]] | None = None

    @property
    def num_serving(self) -> int:
        """Number of replicas that get requests."""
        return sum(slot.state == "serving" for slot in self.slots)

    def live(self, condition: Callable[[R], bool] = lambda _: True) -> list[tuple[Slot[R], R]]:
        """The replicas that satisfy `condition`, with their slots. Includes leaving replicas, which are still updated."""
        return [(slot, slot.replica) for slot in self.slots if slot.replica is not None and condition(slot.replica)]

    def quarantine_reasons(self) -> str:
        """The failure of each slot if all occupied slots are quarantined, so that no replica will serve again; else an empty string."""
        occupied = [slot for slot in self.slots if slot.is_occupied]
        if not all(slot.is_quarantined for slot in occupied):
            return ""
        return "; ".join(f"{slot.index}: {slot.reason}" for slot in occupied)

    def report_failure(self, slot: Slot[R], replica: R, error: Exception) -> None:
        """Replace a replica that failed. Repeated reports of the same replica are ignored."""
        if slot.replica is not replica or self._closed:
            return
        slot.replica = None
        if slot.is_occupied:  # otherwise the replica is leaving, and `leave` ends it
            self._record_failure(slot, error)
            ending = asyncio.create_task(self._end_failed(replica))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            slot.restart_task = asyncio.create_task(self._restart(slot, ending))

    def join(self, index: int) -> None:
        """Start a replica in a vacant slot, or in a new one if `index` is the number of slots. Earlier failures are forgotten."""
        assert not self._closed and index <= len(self.slots)
        if index == len(self.slots):
            self.slots.append(Slot(index, None, is_occupied=False))
        slot = self.slots[index]
        assert slot.state == "vacant" and slot.replica is None
        slot.is_occupied, slot.is_quarantined, slot.failure_times, slot.reason = True, False, [], ""
        slot.restart_task = asyncio.create_task(self._start_or_quarantine(slot))

    async def leave(self, index: int, drain: Callable[[Slot[R], R], Awaitable[None]]) -> None:
        """Vacate a slot in any state. This does not count as a failure.

        A serving replica gets no further work. When no update is in progress, `drain` returns its remaining work, and the replica is ended.
        """
        slot = self.slots[index]
        slot.is_occupied = False
        if slot.restart_task is not None and not slot.restart_task.done():
            slot.restart_task.cancel()
            await asyncio.gather(slot.restart_task, *self._ending, return_exceptions=True)
        replica = slot.replica
        async with self.updating:
            slot.replica = None
        try:
            if replica is not None:
                with suppress(*self._lifecycle.fatal_errors, TimeoutError):
                    await drain(slot, replica)
        finally:
            if replica is not None:
                with suppress(*self._lifecycle.fatal_errors, TimeoutError):
                    await self._end(replica)
        self._lifecycle.on_change()

    @asynccontextmanager
    async def fixed_members(self) -> AsyncIterator[None]:
        """Prevent new replicas from joining while the block runs."""
        async with self.updating:
            self._update_members = None
            yield

    def rank_names(self, kind: str, num_ranks: int, condition: Callable[[R], bool] = lambda _: True) -> list[str]:
        """A unique name for each rank of each live replica that satisfies `condition` and has `num_ranks` ranks.

        The next `apply_update` calls exactly these replicas.
        """
        self._update_members = self.live(condition)
        return [f"{kind} {slot.index}.{slot.num_starts}.{rank}" for slot, _ in self._update_members for rank in range(num_ranks)]

    async def apply_update[T](self, call: Callable[[R], Awaitable[T]], condition: Callable[[R], bool] = lambda _: True) -> list[T]:
        """Like `call_each`, for the replicas of the last `rank_names`; if it was not called, for live ones that satisfy `condition`."""
        assert self.updating.locked(), "replicas are updated in a block of `fixed_members`"
        members, self._update_members = self._update_members, None
        return await self._call_all(self.live(condition) if members is None else members, call)

    async def call_each[T](self, call: Callable[[R], Awaitable[T]]) -> list[T]:
        """Call all live replicas concurrently. Restarts those with a fatal error. Raises the first other error after all have answered."""
        return await self._call_all(self.live(), call)

    async def _call_all[T](self, live: list[tuple[Slot[R], R]], call: Callable[[R], Awaitable[T]]) -> list[T]:
        values: list[T] = []
        errors: list[BaseException] = []
        results = await asyncio.gather(*(call(replica) for _, replica in live), return_exceptions=True)
        for (slot, replica), result in zip(live, results, strict=True):
            if isinstance(result, self._lifecycle.fatal_errors):
                self.report_failure(slot, replica, result)
            elif isinstance(result, BaseException):
                errors.append(result)
            else:
                values.append(result)
        if errors:
            raise errors[0]
        return values

    async def close(self) -> None:
        """End all replicas, including those that are being started or ended. No replica is started afterwards."""
        self._closed = True
        restart_tasks = [slot.restart_task for slot in self.slots if slot.restart_task is not None]
        for task in restart_tasks:
            task.cancel()
        results = await asyncio.gather(*(self._end(replica) for _, replica in self.live()), return_exceptions=True)
        await asyncio.gather(*restart_tasks, *self._ending, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, (*self._lifecycle.fatal_errors, TimeoutError)):
                raise result

    async def _end(self, replica: R) -> None:
        await asyncio.wait_for(self._lifecycle.end(replica), self._lifecycle.end_timeout_s)

    async def _end_failed(self, replica: R) -> None:
        with suppress(Exception):
            # Errors are ignored: the failure of the replica is recorded already.
            await self._end(replica)

    async def _restart(self, slot: Slot[R], ending: asyncio.Task[None]) -> None:
        await asyncio.shield(ending)
        await self._start_or_quarantine(slot, restart=True)

    async def _start_or_quarantine(self, slot: Slot[R], *, restart: bool = False) -> None:
        """Start replicas for a slot until one serves, or quarantine the slot after too many failures."""
        while len(slot.failure_times) <= self._lifecycle.max_restarts:
            try:
                await self._start(slot)
                if restart:
                    self.num_restarts += 1
                    self._lifecycle.log(f"replica {slot.index} is back")
                break
            except Exception as error:
                self._record_failure(slot, error)
        else:
            slot.is_quarantined = True
            self._lifecycle.log(f"replica {slot.index} is in quarantine: it failed {len(slot.failure_times)} time(s) within an hour")
        self._lifecycle.on_change()

    async def _start(self, slot: Slot[R]) -> None:
        replica = await self._lifecycle.start(slot.index)
        try:
            waited_s = 0.0
            while not await self._catch_up(slot, replica):
                if waited_s > VERSION_WAIT_S:
                    raise RuntimeFailure(f"the weight version of the other replicas was not available within {VERSION_WAIT_S:g} s")
                # The lock is released during the wait, because the next update may persist the version.
                await asyncio.sleep(_POLL_S)
                waited_s += _POLL_S
        except BaseException:
            with suppress(*self._lifecycle.fatal_errors, TimeoutError):
                await self._end(replica)
            raise

    async def _catch_up(self, slot: Slot[R], replica: R) -> bool:
        async with self.updating:
            timeout_s = self._lifecycle.catch_up_timeout_s
            try:
                caught_up = await asyncio.wait_for(self._lifecycle.catch_up(replica), timeout_s)
            except TimeoutError as error:
                raise RuntimeFailure(f"it did not load the weight version of the other replicas within {timeout_s:g} s") from error
            if not caught_up:
                return False
            slot.replica = replica
            slot.num_starts += 1
            return True

    def _record_failure(self, slot: Slot[R], error: Exception) -> None:
        now = time.monotonic()
        slot.failure_times = [*(failed_at for failed_at in slot.failure_times if now - failed_at < FAILURE_WINDOW_S), now]
        slot.reason = describe_error(error)
        self._lifecycle.log(f"replica {slot.index} failed: {slot.reason}")
