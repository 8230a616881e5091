"""The log-prob server: one queue, replicas that work it off, and versions that change under it.

Everything that must not be lost lives here, in the process of the callers: requests, who waits for them, and which weights
they want. A replica is handed one batch at a time, and a second one only when that is a full one, so that a busy replica never
waits for its next batch and an idle one never for a batch to fill. The waiting tokens are split evenly over the replicas that
are free. A replica that dies leaves its batches to the others.

Weights change between batches: the queue is held, the batches under way end, the replicas take the update in, the queue goes
on. A batch is made for one version and its answers carry that version.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from mtpctl.logprob.protocol import Bounds, Late, QueueFull, ReplicaDead, Scored, ScoreRequest, VersionGone
from mtpctl.logprob.queue import FairQueue, Waiting
from mtpctl.logprob.replica import END_S, Replica
from mtpctl.recipe import RuntimeFailure
from mtpctl.sync import Manifest, SyncReport, TargetDirty, update_target

ATTEMPTS = 3
"""Replicas that may die over a request before it is taken for the reason."""

Starter = Callable[[int], Awaitable[Replica]]


class Published(Protocol):
    """Where a replica that starts late finds the weights: a `VersionStore`."""

    def versions(self) -> list[int]: ...

    def open(self, version: int) -> Manifest: ...


@dataclass(frozen=True)
class ServerLimits:
    """tokens_per_batch: of a forward pass; queue_tokens: that may wait; batch_deadline_s: a replica that takes longer is dead."""

    tokens_per_batch: int
    queue_tokens: int
    batch_deadline_s: float = 600.0
    max_restarts: int = 3


@dataclass(slots=True)
class Seat:
    """One replica's place; `replica` is None while it is down. `failures` counts those since it last answered."""

    index: int
    replica: Replica | None
    batches: int = 0
    failures: int = 0
    reason: str = ""
    quarantined: bool = False
    restarting: asyncio.Task[None] | None = None


@dataclass(slots=True)
class Counters:
    """Since the server started. busy_s: replica seconds spent in batches; wait_s: request seconds from submission to answer."""

    requests: int = 0
    failed: int = 0
    refused: int = 0
    tokens: int = 0
    batches: int = 0
    retried: int = 0
    restarts: int = 0
    updates: int = 0
    busy_s: float = 0.0
    wait_s: float = 0.0
    stall_s: float = 0.0


@dataclass(slots=True)
class _Room:
    tokens: int
    granted: asyncio.Future[None] = field(repr=False)


class LogprobServer:
    """Replicas behind one queue. Make it with `await LogprobServer.start(…)`, and end it with `await server.close()`."""

    def __init__(self, replicas: list[Replica], start: Starter, published: Published | None, limits: ServerLimits) -> None:
        self.seats = [Seat(index, replica) for index, replica in enumerate(replicas)]
        self.bounds: Bounds = replicas[0].bounds
        self.limits = limits
        self.counters = Counters()
        self.version = max(replica.version for replica in replicas)
        self.queue = FairQueue()
        self._start, self._published = start, published
        self._paused = False
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._updating = asyncio.Lock()
        self._rooms: deque[_Room] = deque()
        self._granted = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._rate = 0.0

    @classmethod
    async def start(cls, start: Starter, count: int, limits: ServerLimits, *, published: Published | None = None) -> LogprobServer:
        """Start `count` replicas with `start(index)`, at once. `published`: where a restarted one finds its weights."""
        results = await asyncio.gather(*(start(index) for index in range(count)), return_exceptions=True)
        failed = [result for result in results if isinstance(result, BaseException)]
        replicas = [result for result in results if isinstance(result, Replica)]
        if failed:
            await asyncio.gather(*(replica.end() for replica in replicas))
            raise failed[0]
        return cls(replicas, start, published, limits)

    # ------------------------------------------------------------------------------------------------------- requests

    async def score(self, request: ScoreRequest, *, wait: bool = True) -> Scored:
        """The answer to one request, whatever happens to the replicas on the way.

        Where the queue is full, waits for room, or with `wait=False` raises QueueFull. Raises RequestRefused for a request that
        does not fit the model, VersionGone where its weights are not held any more, Late after its deadline, and RuntimeFailure
        where no replica is left.
        """
        self.bounds.check(request)
        began = time.monotonic()
        answer: asyncio.Future[Scored] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(request.deadline_s):
                await self._wait_for_room(request, wait)
                self.queue.put(Waiting(request, answer))
                self._settle()
                result = await answer
        except TimeoutError as error:
            self.counters.failed += 1
            newest = f"; the newest weights are {self.version}" if not request.allows(self.version) else ""
            raise Late(f"no answer within {request.deadline_s:g} s{newest}") from error
        except QueueFull:
            self.counters.refused += 1
            raise
        except Exception:
            self.counters.failed += 1
            raise
        finally:
            if not answer.done() or answer.cancelled():
                answer.cancel()
                self.queue.remove(lambda item: item.answer is answer)
                self._give_room()
        self.counters.requests += 1
        self.counters.wait_s += time.monotonic() - began
        return result

    async def stream(self, requests: Iterable[ScoreRequest], *, wait: bool = True) -> AsyncIterator[tuple[int, Scored]]:
        """Answers as they come, each with the place of its request."""
        listed = list(requests)

        async def one(place: int) -> tuple[int, Scored]:
            return place, await self.score(listed[place], wait=wait)

        tasks = [asyncio.create_task(one(place)) for place in range(len(listed))]
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            for left in tasks:
                left.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def check_room(self, tokens: int) -> None:
        """Raise QueueFull where `tokens` more may not wait now."""
        if self._full(tokens):
            raise QueueFull(self.queue.tokens, self._seconds_of(min(tokens, self.limits.queue_tokens)))

    async def _wait_for_room(self, request: ScoreRequest, wait: bool) -> None:
        if not wait:
            self.check_room(request.tokens)
        elif self._rooms or self._full(request.tokens):
            room = _Room(request.tokens, asyncio.get_running_loop().create_future())
            self._rooms.append(room)
            try:
                await room.granted
            finally:
                if room in self._rooms:
                    self._rooms.remove(room)
                else:
                    self._granted -= room.tokens

    def _full(self, tokens: int) -> bool:
        """Whether so many more are too many. A queue that is empty takes one request of any size."""
        waiting = self.queue.tokens + self._granted
        return waiting > 0 and waiting + tokens > self.limits.queue_tokens

    def _seconds_of(self, tokens: int) -> float:
        """How long the replicas should take to make room for `tokens` more."""
        over = max(0, self.queue.tokens + tokens - self.limits.queue_tokens)
        return float(max(1, math.ceil(over / self._rate))) if self._rate else 1.0

    def _give_room(self) -> None:
        """Let those in line for room go on, in turn, as far as there is some."""
        while self._rooms and not self._full(self._rooms[0].tokens):
            room = self._rooms.popleft()
            self._granted += room.tokens
            if not room.granted.done():
                room.granted.set_result(None)

    # -------------------------------------------------------------------------------------------------------- batches

    def _settle(self) -> None:
        """Hand out what can be handed out, and refuse what nobody will ever answer. Called whenever something changed."""
        if self._closed:
            return
        self._refuse_hopeless()
        while not self._paused and self._hand_out():
            pass
        self._give_room()

    def _hand_out(self) -> bool:
        """Give one batch to the least busy replica that can take one."""
        free = [seat for seat in self.seats if seat.replica is not None and seat.batches == 0]
        full = self.limits.tokens_per_batch
        # One batch ahead, but only a full one: a part of one would run faster together with what comes meanwhile.
        ahead = [seat for seat in self.seats if seat.replica is not None and seat.batches == 1 and self.queue.tokens >= full]
        budget = min(full, math.ceil(self.queue.tokens / len(free))) if free else full
        for seat in (*free, *ahead):
            assert seat.replica is not None
            for version in seat.replica.versions:
                batch = self.queue.take(budget, lambda r, v=version, s=seat: self._wants(r, v, s))  # type: ignore[misc]
                if batch:
                    seat.batches += 1
                    self._idle.clear()
                    self._keep(self._run(seat, seat.replica, batch, version, seat.replica.score([i.request for i in batch], version)))
                    return True
        return False

    @staticmethod
    def _wants(request: ScoreRequest, version: int, seat: Seat) -> bool:
        """Whether this replica should answer under `version`: its current weights unless the request pins others."""
        assert seat.replica is not None
        return request.allows(version) and (version == seat.replica.version or not request.allows(seat.replica.version))

    async def _run(self, seat: Seat, replica: Replica, batch: list[Waiting], version: int, answers: Awaitable[list[Scored]]) -> None:
        began = time.monotonic()
        try:
            scored = await asyncio.wait_for(answers, self.limits.batch_deadline_s * seat.batches)
        except (ReplicaDead, TimeoutError) as error:
            self._lost(seat, replica, error)
            self._again(batch, error, died=True)
        except Exception as error:
            # The pass failed. Ranks that stand in a collective of it will not answer, and then the replica is lost too.
            await self._check_alive(seat, replica)
            if len(batch) == 1 and not batch[0].answer.done():
                batch[0].answer.set_exception(error)
            elif len(batch) > 1:
                self._again(batch, error, died=False)
        else:
            seconds = time.monotonic() - began
            seat.failures = 0
            tokens = sum(item.tokens for item in batch)
            self._rate = tokens / seconds if not self._rate else 0.8 * self._rate + 0.2 * tokens / seconds
            self.counters.batches += 1
            self.counters.tokens += tokens
            self.counters.busy_s += seconds
            for item, result in zip(batch, scored, strict=True):
                if not item.answer.done():
                    assert result.version == version
                    item.answer.set_result(result)
        finally:
            seat.batches -= 1
            if not any(s.batches for s in self.seats):
                self._idle.set()
            self._settle()

    def _again(self, batch: list[Waiting], error: Exception, *, died: bool) -> None:
        """Requests of a batch that failed go back to where they stood, each into a batch of its own, to tell which one it was."""
        for item in reversed(batch):
            if item.answer.done():
                continue
            item.attempts += died and item.alone
            if item.attempts >= ATTEMPTS:
                item.answer.set_exception(RuntimeFailure(f"scoring the request ended {ATTEMPTS} replicas, the last by {error}"))
                continue
            item.alone = True
            self.counters.retried += 1
            self.queue.put(item, first=True)

    def _refuse_hopeless(self) -> None:
        """Answer with an error what no replica will ever serve."""
        if all(seat.quarantined for seat in self.seats):
            reasons = "; ".join(f"{seat.index}: {seat.reason}" for seat in self.seats)
            self._refuse(lambda item: True, RuntimeFailure(f"every log-prob replica failed: {reasons}"))
            return
        held = {version for seat in self.seats if seat.replica is not None for version in seat.replica.versions}
        if not held or not self.queue.pinned:
            return

        def gone(item: Waiting) -> bool:
            pinned = item.request.version
            return pinned is not None and pinned < max(held) and pinned not in held

        def never(item: Waiting) -> bool:
            pinned, least = item.request.version, item.request.at_least
            return pinned is not None and least is not None and pinned < least

        self._refuse(gone, VersionGone(f"version: those weights are no longer held; there are {sorted(held)}"))
        self._refuse(never, VersionGone("at_least: is above the pinned version; leave one of them out"))

    def _refuse(self, unwanted: Callable[[Waiting], bool], error: Exception) -> None:
        for item in self.queue.remove(unwanted):
            if not item.answer.done():
                item.answer.set_exception(error)

    # ------------------------------------------------------------------------------------------------------- failures

    async def _check_alive(self, seat: Seat, replica: Replica) -> None:
        try:
            await asyncio.wait_for(replica.ping(), END_S)
        except (ReplicaDead, TimeoutError) as error:
            self._lost(seat, replica, error)

    def _lost(self, seat: Seat, replica: Replica, error: Exception) -> None:
        """Take a dead replica out, once, however many calls noticed, and have another one started."""
        if seat.replica is not replica or self._closed:
            return
        seat.replica = None
        seat.failures += 1
        seat.reason = f"{type(error).__name__}: {error}"
        seat.restarting = asyncio.create_task(self._restart(seat, replica))

    async def _restart(self, seat: Seat, dead: Replica) -> None:
        with suppress(Exception):
            # Whatever is left of it: it failed already, and why is kept as the seat's reason.
            await asyncio.wait_for(dead.end(), END_S)
        while seat.failures <= self.limits.max_restarts:
            try:
                await self._replace(seat)
                break
            except Exception as error:
                seat.failures += 1
                seat.reason = f"{type(error).__name__}: {error}"
        else:
            seat.quarantined = True
        self._settle()

    async def _replace(self, seat: Seat) -> None:
        fresh = await self._start(seat.index)
        try:
            async with self._updating:
                await self._bring_up(fresh)
                seat.replica = fresh
        except BaseException:
            await fresh.end()
            raise
        self.counters.restarts += 1

    async def _bring_up(self, replica: Replica) -> None:
        """Take a fresh replica to the versions that the others serve; never beyond, where the newest is still on its way."""
        published = self._published.versions() if self._published is not None else []
        for version in [v for v in published if replica.version < v <= self.version][-1 - replica.keep_previous :]:
            assert self._published is not None
            await update_target(replica, self._published.open(version))

    # --------------------------------------------------------------------------------------------------------- control

    async def pause_serving(self) -> None:
        """Hand out no more batches, and return once those under way are answered. Requests go on queueing."""
        self._paused = True
        await self._idle.wait()

    def resume_serving(self) -> None:
        """Hand out batches again."""
        self._paused = False
        self._settle()

    async def update(self, manifest: Manifest, *, verify: bool = False, deadline_s: float = 120.0) -> list[SyncReport]:
        """Take every live replica to the version of `manifest`; one that dies over it is restarted with it.

        Raises SyncError where a replica refuses the update and still has its old weights.
        """
        async with self._updating:
            began = time.monotonic()
            try:
                await self.pause_serving()
                live = [(seat, seat.replica) for seat in self.seats if seat.replica is not None and seat.replica.version < manifest.version]
                calls = (update_target(replica, manifest, verify=verify, deadline_s=deadline_s) for _, replica in live)
                results = await asyncio.gather(*calls, return_exceptions=True)
                for (seat, replica), result in zip(live, results, strict=True):
                    if isinstance(result, ReplicaDead | TargetDirty):
                        self._lost(seat, replica, result)
                refused = [r for r in results if isinstance(r, Exception) and not isinstance(r, ReplicaDead | TargetDirty)]
                if refused:
                    raise refused[0]
                self.version = manifest.version
                self.counters.updates += 1
            finally:
                stall = time.monotonic() - began
                self.counters.stall_s += stall
                self.resume_serving()
        done = [result for result in results if isinstance(result, SyncReport)]
        return [SyncReport(r.version, r.nbytes, r.seconds, stall, r.verified) for r in done]

    def health(self) -> list[dict[str, object]]:
        """One entry a replica: whether it serves, its versions, and why it does not."""
        return [
            {
                "replica": seat.index,
                "alive": seat.replica is not None,
                "versions": seat.replica.versions if seat.replica is not None else [],
                "state": "serving" if seat.replica is not None else "quarantined" if seat.quarantined else "restarting",
                "reason": seat.reason if seat.replica is None else "",
            }
            for seat in self.seats
        ]

    async def watch(self, every_s: float = 5.0) -> None:
        """Look after replicas that have nothing to do, so that a dead one is replaced before it is needed. Runs until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            for seat in self.seats:
                if seat.replica is not None and seat.batches == 0 and not self._updating.locked():
                    await self._check_alive(seat, seat.replica)

    async def close(self) -> None:
        """End every replica; requests that still wait fail."""
        self._closed = True
        self._refuse(lambda item: True, RuntimeFailure("the log-prob server has ended"))
        for task in [*self._tasks, *(seat.restarting for seat in self.seats if seat.restarting is not None)]:
            task.cancel()
        for seat in self.seats:
            if seat.replica is not None:
                await seat.replica.end()

    def _keep(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
