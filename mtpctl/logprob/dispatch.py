"""From the queue to the replicas and back: which requests make a batch, who gets it, and what becomes of a batch that failed.

A replica is handed one batch at a time, and a second one only when that is a full one, so that a busy replica never waits for
its next batch and an idle one never for a batch to fill. The waiting tokens are split evenly over the replicas that are free.
A replica that dies leaves its batches to the others. A batch is made for one version, and its answers carry that version.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from mtpctl.cluster.replicas import Replicas, Seat
from mtpctl.errors import MtpctlError, RuntimeFailure
from mtpctl.logprob.protocol import ReplicaDead, Scored, ScoreRequest, VersionGone
from mtpctl.logprob.queue import Waiting
from mtpctl.logprob.replica import END_S, Replica
from mtpctl.logprob.room import BoundedQueue

ATTEMPTS = 3
"""Replicas that may die over a request before it is taken for the reason."""


@dataclass(frozen=True)
class ServerLimits:
    """tokens_per_batch: of a forward pass; queue_tokens: that may wait; batch_deadline_s: a replica that takes longer is dead;
    sync_deadline_s: of a version that a fresh replica takes in."""

    tokens_per_batch: int
    queue_tokens: int
    batch_deadline_s: float = 600.0
    max_restarts: int = 3
    sync_deadline_s: float = 120.0


@dataclass(slots=True)
class Counters:
    """Since the server started. busy_s: replica seconds spent in batches; wait_s: request seconds from submission to answer."""

    requests: int = 0
    failed: int = 0
    refused: int = 0
    tokens: int = 0
    batches: int = 0
    retried: int = 0
    updates: int = 0
    busy_s: float = 0.0
    wait_s: float = 0.0
    stall_s: float = 0.0


class Dispatcher:
    """Works the queue off. Owns no replica: they come and go beside it, and whoever changes something calls `settle`."""

    def __init__(self, replicas: Replicas[Replica], limits: ServerLimits) -> None:
        self.replicas, self.limits = replicas, limits
        self.queue = BoundedQueue(limits.queue_tokens)
        self.counters = Counters()
        self._paused_at: float | None = None
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended_at: dict[int, float] = {}

    def held(self) -> list[int]:
        """Weight versions that some replica can answer under."""
        return sorted({version for _, replica in self.replicas.live() for version in replica.versions})

    async def pause(self) -> None:
        """Hand out no more batches, and return once those under way are answered."""
        if self._paused_at is None:
            self._paused_at = time.monotonic()
        await self._idle.wait()

    def resume(self) -> float:
        """Hand out batches again. Returns the seconds since the pause, which count as stall; 0 where there was none."""
        stood = 0.0
        if self._paused_at is not None:
            stood = time.monotonic() - self._paused_at
        self._paused_at = None
        self.counters.stall_s += stood
        self.settle()
        return stood

    def close(self) -> None:
        """Hand out nothing any more; what waits, is under way or comes fails."""
        self._closed = True
        self.settle()
        for task in self._tasks:
            task.cancel()

    def settle(self) -> None:
        """Hand out what can be handed out, and refuse what nobody will ever answer. Called whenever something changed."""
        if self._closed:
            self.refuse(lambda item: True, _ended())
            self.queue.give_room()
            return
        self._refuse_hopeless()
        while self._paused_at is None and self._hand_out():
            pass
        self.queue.give_room()

    def _hand_out(self) -> bool:
        """Give one batch to the least busy replica that can take one."""
        live = self.replicas.live()
        free = [(seat, replica) for seat, replica in live if seat.busy == 0]
        full = self.limits.tokens_per_batch
        # One batch ahead, but only a full one: a part of one would run faster together with what comes meanwhile.
        ahead = [(seat, replica) for seat, replica in live if seat.busy == 1 and self.queue.tokens >= full]
        budget = min(full, math.ceil(self.queue.tokens / len(free))) if free else full
        for seat, replica in (*free, *ahead):
            for version in replica.versions:
                batch = self.queue.take(budget, lambda r, v=version, now=replica.version: _wants(r, v, now))  # type: ignore[misc]
                if batch:
                    seat.busy += 1
                    self._idle.clear()
                    self._keep(self._run(seat, replica, batch, version, replica.score([i.request for i in batch], version)))
                    return True
        return False

    async def _run(
        self, seat: Seat[Replica], replica: Replica, batch: list[Waiting], version: int, answers: Awaitable[list[Scored]]
    ) -> None:
        began = time.monotonic()
        try:
            scored = await asyncio.wait_for(answers, self.limits.batch_deadline_s * seat.busy)
        except (ReplicaDead, TimeoutError) as error:
            self.replicas.lost(seat, replica, error)
            self._again(batch, error, died=True)
        except asyncio.CancelledError:
            for item in batch:
                if not item.answer.done():
                    item.answer.set_exception(_ended())
            raise
        except Exception as error:
            # The pass failed. Ranks that stand in a collective of it will not answer, and then the replica is lost too.
            await self.check_alive(seat, replica)
            if len(batch) == 1 and not batch[0].answer.done():
                batch[0].answer.set_exception(_failed(error))
            elif len(batch) > 1:
                self._again(batch, error, died=False)
        else:
            # A batch that was handed out ahead began when the one before it ended.
            began, now = max(began, self._ended_at.get(seat.index, began)), time.monotonic()
            seconds, self._ended_at[seat.index] = now - began, now
            tokens = sum(item.tokens for item in batch)
            self.queue.served(tokens, seconds)
            self.counters.batches += 1
            self.counters.tokens += tokens
            self.counters.busy_s += seconds
            for item, result in zip(batch, scored, strict=True):
                if not item.answer.done():
                    assert result.version == version
                    item.answer.set_result(result)
        finally:
            seat.busy -= 1
            if not any(s.busy for s in self.replicas.seats):
                self._idle.set()
            self.settle()

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
        if reasons := self.replicas.hopeless():
            self.refuse(lambda item: True, RuntimeFailure(f"every log-prob replica failed: {reasons}"))
            return
        held = self.held()
        if not held or not self.queue.pinned:
            return

        def gone(item: Waiting) -> bool:
            pinned = item.request.version
            return pinned is not None and pinned < max(held) and pinned not in held

        def never(item: Waiting) -> bool:
            pinned, least = item.request.version, item.request.at_least
            return pinned is not None and least is not None and pinned < least

        self.refuse(gone, VersionGone(f"version: those weights are no longer held; there are {held}"))
        self.refuse(never, VersionGone("at_least: is above the pinned version; leave one of them out"))

    def refuse(self, unwanted: Callable[[Waiting], bool], error: Exception) -> None:
        """Take those that wait and are `unwanted` out of the queue, and answer them with `error`."""
        for item in self.queue.remove(unwanted):
            if not item.answer.done():
                item.answer.set_exception(error)

    async def check_alive(self, seat: Seat[Replica], replica: Replica) -> None:
        """Ask a replica whether it is there, and take it out where it is not."""
        try:
            await asyncio.wait_for(replica.ping(), END_S)
        except (ReplicaDead, TimeoutError) as error:
            self.replicas.lost(seat, replica, error)

    def _keep(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _failed(error: Exception) -> MtpctlError:
    """What a pass over one request raised, as its caller is told: the error of a kernel or an allocator in one line."""
    if isinstance(error, MtpctlError):
        return error
    failure = RuntimeFailure(f"scoring the request failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    failure.__cause__ = error
    return failure


def _ended() -> RuntimeFailure:
    return RuntimeFailure("the log-prob server has ended")


def _wants(request: ScoreRequest, version: int, current: int) -> bool:
    """Whether a replica should answer under `version`: its current weights unless the request pins others."""
    return request.allows(version) and (version == current or not request.allows(current))
