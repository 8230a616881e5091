"""Several engines as one `Generator`: routing, back-pressure, partial responses, and replicas that die.

A request belongs to the pool until its sample is finished. A replica gets a copy, so a replica that dies takes nothing
with it: the request goes to another one, from the state it was sent in. Responses cut by `pause("abort")` come back with
their tokens, wait for `resume`, and go on wherever there is room.

A group's samples share their prompt, so they go to the replica that has its prefix cached, unless it has `AFFINITY_SLACK`
more responses in flight than the least busy one.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from mtpctl.recipe import RuntimeFailure
from mtpctl.rollout.actor import Replica
from mtpctl.rollout.protocol import ABORTED, EngineDead, Health, SpecStats
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.sync.manifest import Manifest
from mtpctl.sync.protocol import PauseMode, TargetDirty
from mtpctl.sync.session import SyncReport

AFFINITY_SLACK = 8
GRACE_S = 60.0
"""Seconds beyond a request's own deadline after which a replica that has not answered counts as dead."""

Starter = Callable[[int], Awaitable[Replica]]
Latest = Callable[[], Manifest | None]


@dataclass(slots=True)
class _Seat:
    """One replica's place in the pool; `replica` is None while it is down."""

    index: int
    replica: Replica | None
    in_flight: int = 0
    failures: int = 0
    reason: str = ""
    quarantined: bool = False
    groups: dict[str, int] = field(default_factory=dict)
    restarting: asyncio.Task[None] | None = None


class ReplicaPool:
    """Engines behind one face. Make it with `await ReplicaPool.start(…)`, and end it with `await pool.close()`."""

    def __init__(self, replicas: list[Replica], start: Starter, latest: Latest, *, max_in_flight: int, max_restarts: int) -> None:
        self._seats = [_Seat(index, replica) for index, replica in enumerate(replicas)]
        self._start = start
        self._latest = latest
        self._max_in_flight = max_in_flight
        self._max_restarts = max_restarts
        self._running = asyncio.Event()
        self._running.set()
        self._room = asyncio.Condition()
        self._updating = asyncio.Lock()
        self._paused: PauseMode | None = None

    @classmethod
    async def start(cls, start: Starter, count: int, *, latest: Latest, max_in_flight: int, max_restarts: int = 3) -> ReplicaPool:
        """Start `count` replicas with `start(index)`, at once.

        `latest` gives the newest published version, which a restarted replica takes in before it serves.
        """
        replicas = await asyncio.gather(*(start(index) for index in range(count)))
        return cls(list(replicas), start, latest, max_in_flight=max_in_flight, max_restarts=max_restarts)

    # ------------------------------------------------------------------------------------------------- generation

    async def generate(self, requests: AsyncIterable[GenerationRequest]) -> AsyncGenerator[Sample]:
        """See `Generator.generate`. Raises RuntimeFailure when every replica is in quarantine."""
        done: asyncio.Queue[Sample | BaseException | None] = asyncio.Queue()
        tasks: set[asyncio.Task[None]] = set()
        outstanding = 0

        async def one(request: GenerationRequest) -> None:
            try:
                done.put_nowait(await self.sample(request))
            except Exception as error:
                done.put_nowait(error)

        def has_room() -> bool:
            return outstanding < self._capacity()

        async def admit() -> None:
            nonlocal outstanding
            try:
                async for request in requests:
                    outstanding += 1
                    tasks.add(task := asyncio.create_task(one(request)))
                    task.add_done_callback(tasks.discard)
                    async with self._room:
                        await self._room.wait_for(has_room)
                done.put_nowait(None)
            except Exception as error:
                done.put_nowait(error)

        admission = asyncio.create_task(admit())
        admitting = True
        try:
            while admitting or outstanding:
                result = await done.get()
                if isinstance(result, BaseException):
                    raise result
                if result is None:
                    admitting = False
                    continue
                outstanding -= 1
                async with self._room:
                    self._room.notify_all()
                yield result
        finally:
            for task in (admission, *tasks):
                task.cancel()

    async def sample(self, request: GenerationRequest) -> Sample:
        """One request's finished sample, whatever happens to the replicas on the way."""
        clock = asyncio.get_running_loop().time
        until = clock() + request.deadline_s
        while True:
            await self._running.wait()
            seat = await self._take(request.sample.group_id)
            replica = seat.replica
            assert replica is not None
            attempt = replace(request, sample=copy.deepcopy(request.sample), deadline_s=max(until - clock(), 0.0))
            try:
                sample = await asyncio.wait_for(replica.generate(attempt), attempt.deadline_s + GRACE_S)
            except (EngineDead, TargetDirty, TimeoutError) as error:
                self._lost(seat, replica, error)
                continue
            finally:
                await self._give(seat, request.sample.group_id)
            if sample.finish_reason != ABORTED:
                return sample
            request = replace(request, sample=sample)

    async def _take(self, group: str) -> _Seat:
        """A replica with room, counted as busier by one."""
        async with self._room:
            await self._room.wait_for(lambda: any(self._free(seat) for seat in self._seats) or self._all_quarantined())
            if self._all_quarantined():
                raise RuntimeFailure("every rollout replica failed: " + "; ".join(f"{seat.index}: {seat.reason}" for seat in self._seats))
            free = [seat for seat in self._seats if self._free(seat)]
            chosen = min(free, key=lambda seat: seat.in_flight)
            for seat in free:
                if seat.groups.get(group) and seat.in_flight <= chosen.in_flight + AFFINITY_SLACK:
                    chosen = seat
            chosen.in_flight += 1
            chosen.groups[group] = chosen.groups.get(group, 0) + 1
            return chosen

    async def _give(self, seat: _Seat, group: str) -> None:
        async with self._room:
            seat.in_flight -= 1
            seat.groups[group] -= 1
            if not seat.groups[group]:
                del seat.groups[group]
            self._room.notify_all()

    def _capacity(self) -> int:
        """Responses that may be in flight at once; never none, so that a pool without replicas still says so."""
        return max(self._max_in_flight * sum(not seat.quarantined for seat in self._seats), 1)

    def _free(self, seat: _Seat) -> bool:
        return seat.replica is not None and seat.in_flight < self._max_in_flight

    def _all_quarantined(self) -> bool:
        return all(seat.quarantined for seat in self._seats)

    # ------------------------------------------------------------------------------------------------- failures

    def _lost(self, seat: _Seat, replica: Replica, error: Exception) -> None:
        """Take a failed replica out once, however many of its requests noticed, and have another one started."""
        if seat.replica is not replica:
            return
        seat.replica = None
        seat.failures += 1
        seat.reason = f"{type(error).__name__}: {error}"
        seat.restarting = asyncio.create_task(self._restart(seat, replica))

    async def _restart(self, seat: _Seat, dead: Replica) -> None:
        with suppress(Exception):
            # Whatever is left of it: it failed already, and why is kept as the seat's reason.
            await asyncio.wait_for(dead.shutdown(), GRACE_S)
        while seat.failures <= self._max_restarts:
            try:
                fresh = await self._start(seat.index)
                async with self._updating:
                    if (manifest := self._latest()) is not None:
                        await fresh.update(manifest, mode="keep", verify=False, deadline_s=GRACE_S)
                    if self._paused is not None:
                        await fresh.pause(self._paused)
                    seat.replica = fresh
                break
            except Exception as error:
                seat.failures += 1
                seat.reason = f"{type(error).__name__}: {error}"
        else:
            seat.quarantined = True
        async with self._room:
            self._room.notify_all()

    # ------------------------------------------------------------------------------------------------- control

    async def update(
        self, manifest: Manifest, *, mode: PauseMode = "keep", verify: bool = False, deadline_s: float = 120.0
    ) -> list[SyncReport]:
        """Take every live replica to the version of `manifest`, at once. One that dies on the way is restarted with it.

        Raises SyncError where a replica refuses the update and still has its old weights.
        """
        async with self._updating:
            live = self._live()
            calls = (replica.update(manifest, mode=mode, verify=verify, deadline_s=deadline_s) for _, replica in live)
            results = await asyncio.gather(*calls, return_exceptions=True)
        reports: list[SyncReport] = []
        refused: list[BaseException] = []
        for (seat, replica), result in zip(live, results, strict=True):
            if isinstance(result, SyncReport):
                reports.append(result)
            elif isinstance(result, EngineDead | TargetDirty):
                self._lost(seat, replica, result)
            else:
                refused.append(result)
        if refused:
            raise refused[0]
        return reports

    async def pause(self, mode: PauseMode = "keep") -> None:
        """See `Generator.pause`. Requests that come back cut wait here for `resume`."""
        async with self._updating:
            self._paused = mode
            self._running.clear()
            await self._each(lambda replica: replica.pause(mode))

    async def resume(self) -> None:
        """See `Generator.resume`."""
        async with self._updating:
            self._paused = None
            await self._each(lambda replica: replica.resume())
            self._running.set()

    async def spec_stats(self) -> SpecStats:
        """Summed over the replicas that are alive."""
        total = SpecStats()
        for stats in await self._each(lambda replica: replica.spec_stats()):
            total.add(stats)
        return total

    async def health(self) -> list[Health]:
        """One entry for each replica, dead ones included."""
        found = []
        for seat in self._seats:
            if seat.replica is None:
                state = "in quarantine" if seat.quarantined else "restarting"
                found.append(Health(alive=False, in_flight=seat.in_flight, reason=f"{state} after {seat.reason}"))
                continue
            try:
                found.append(await seat.replica.health())
            except EngineDead as error:
                found.append(Health(alive=False, reason=str(error)))
        return found

    async def close(self) -> None:
        """End every replica."""
        for seat in self._seats:
            if seat.restarting is not None:
                seat.restarting.cancel()
        await self._each(lambda replica: replica.shutdown())

    def _live(self) -> list[tuple[_Seat, Replica]]:
        return [(seat, seat.replica) for seat in self._seats if seat.replica is not None]

    async def _each[T](self, call: Callable[[Replica], Awaitable[T]]) -> list[T]:
        """The answers of the live replicas; one that turns out dead is restarted."""
        live = self._live()
        answers: list[T] = []
        for (seat, replica), answer in zip(live, await asyncio.gather(*(call(r) for _, r in live), return_exceptions=True), strict=True):
            if isinstance(answer, EngineDead | TargetDirty):
                self._lost(seat, replica, answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                answers.append(answer)
        return answers
