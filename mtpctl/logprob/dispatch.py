"""Sends batches of queued requests to replicas, and handles failures.

An idle replica gets a batch immediately, even if the batch is not full. A busy replica gets one full batch in advance, so that it never
waits for its next batch. Queued tokens are split evenly over free replicas. Batches of a replica that dies go to the others. A batch
is scored with one weight version, and its answers contain the version.

Callers get equal shares of tokens (start-time fair queueing, Goyal et al. 1996). Each caller has a queue, and an account of the tokens that
were scored for it. The next request is from the caller with the smallest account. The account of a caller that returns after a pause is
raised to the current level, so callers cannot accumulate a share. A batch is filled up to its budget. A request that does not fit keeps its
turn for the next batch, so a long request does not wait forever.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field

from mtpctl.cluster.replicas import Replicas, Slot
from mtpctl.errors import MtpctlError, RuntimeFailure
from mtpctl.logprob.protocol import QueueFull, ReplicaDead, Scored, ScoreRequest, VersionGone
from mtpctl.logprob.replica import RANK_DEADLINE_S, Replica

MAX_CALLERS = 1024
"""Number of callers from which on the accounts of those without queued requests are dropped."""


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A queued request; the caller awaits `answer`.

    `isolated`: it gets a separate batch, because a pass with it failed. `attempts`: number of replicas that died while they scored it in a
    separate batch.
    """

    request: ScoreRequest
    answer: asyncio.Future[Scored]
    attempts: int = 0
    isolated: bool = False

    @property
    def tokens(self) -> int:
        return self.request.tokens


@dataclass(slots=True)
class _CallerQueue:
    account: float
    waiting: deque[QueuedRequest] = field(default_factory=deque)


class FairQueue:
    """Queued requests by caller. `tokens`, `requests`: totals of all callers. `pinned`: number of requests for a specific version."""

    def __init__(self) -> None:
        self._queues: dict[str, _CallerQueue] = {}
        # The largest value of an account when a request was taken from it: the virtual time of fair queueing.
        self._level = 0.0
        self.tokens = 0
        self.requests = 0
        self.pinned = 0

    def put(self, item: QueuedRequest, *, first: bool = False) -> None:
        """Append to the caller's queue. With `first`, for requests of a failed batch, insert at its head and refund the account."""
        caller = item.request.caller
        has_account = caller in self._queues
        queue = self._queues.setdefault(caller, _CallerQueue(self._level))
        if first:
            queue.waiting.appendleft(item)
            if has_account:
                queue.account -= item.tokens
        else:
            if not queue.waiting:
                queue.account = max(queue.account, self._level)
            queue.waiting.append(item)
        self._count(item, 1)

    def take(self, budget: int, ready: Callable[[ScoreRequest], bool]) -> list[QueuedRequest]:
        """Remove and return the next batch: `ready` requests within `budget` tokens, or a single one that is longer or isolated."""
        batch: list[QueuedRequest] = []
        remaining_tokens = budget
        turns = [(queue.account, caller) for caller, queue in self._queues.items() if queue.waiting]
        heapq.heapify(turns)
        while turns:
            _, caller = heapq.heappop(turns)
            queue = self._queues[caller]
            index = next((i for i, item in enumerate(queue.waiting) if ready(item.request)), None)
            if index is None:
                continue
            item = queue.waiting[index]
            if batch and (item.tokens > remaining_tokens or item.isolated):
                continue
            del queue.waiting[index]
            self._level = max(self._level, queue.account)
            queue.account += item.tokens
            self._on_removed(item)
            batch.append(item)
            remaining_tokens -= item.tokens
            if item.isolated or remaining_tokens <= 0:
                break
            if queue.waiting:
                heapq.heappush(turns, (queue.account, caller))
        return batch

    def remove(self, should_remove: Callable[[QueuedRequest], bool]) -> list[QueuedRequest]:
        """Remove and return the requests for which `should_remove` is true."""
        removed = [item for item in self if should_remove(item)]
        for item in removed:
            self._queues[item.request.caller].waiting.remove(item)
            self._on_removed(item)
        return removed

    def __iter__(self) -> Iterator[QueuedRequest]:
        for queue in self._queues.values():
            yield from queue.waiting

    def _count(self, item: QueuedRequest, sign: int) -> None:
        self.tokens += sign * item.tokens
        self.requests += sign
        self.pinned += sign * (item.request.version is not None)

    def _on_removed(self, item: QueuedRequest) -> None:
        self._count(item, -1)
        if not self.requests:
            self._queues.clear()
            self._level = 0.0
        elif len(self._queues) > MAX_CALLERS:
            for caller in [caller_name for caller_name, queue in self._queues.items() if not queue.waiting]:
                del self._queues[caller]


SMOOTHING = 0.8
"""Decay, per batch, of the running sums of scored tokens and seconds."""


@dataclass(slots=True, eq=False)
class _RoomWaiter:
    tokens: int
    admitted: asyncio.Future[None]
    done: bool = False


class BoundedQueue(FairQueue):
    """A `FairQueue` of at most `limit` tokens. When empty, it accepts one request of any size."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self._reserved = 0
        self._waiters: deque[_RoomWaiter] = deque()
        self._scored_tokens = self._scoring_s = 0.0

    def check_capacity(self, tokens: int) -> None:
        """Raise QueueFull if there is no room for `tokens` more tokens."""
        if self._full(tokens):
            excess_tokens = self.tokens + min(tokens, self.limit) - self.limit
            raise QueueFull(
                self.tokens,
                float(max(1, math.ceil(excess_tokens * self._scoring_s / self._scored_tokens))) if self._scored_tokens else 1.0,
            )

    async def wait_for_room(self, tokens: int) -> None:
        """Wait for room for `tokens` more tokens. The caller must `put` them immediately, because the room is no longer reserved."""
        if not self._waiters and not self._full(tokens):
            return
        waiter = _RoomWaiter(tokens, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            await waiter.admitted
        finally:
            if waiter.done:
                self._reserved -= waiter.tokens
            else:
                self._waiters.remove(waiter)

    def admit_waiters(self) -> None:
        """Admit waiting callers in order while there is room. Call it whenever a request has left the queue."""
        while self._waiters and not self._full(self._waiters[0].tokens):
            waiter = self._waiters.popleft()
            waiter.done = True
            self._reserved += waiter.tokens
            if not waiter.admitted.done():
                waiter.admitted.set_result(None)

    def served(self, tokens: int, seconds: float) -> None:
        """Record that a replica scored `tokens` in `seconds`, to estimate `QueueFull.retry_after_s`."""
        # Running sums of both, not a mean of rates: a batch that finishes together with another one seems to take almost no time.
        self._scored_tokens, self._scoring_s = SMOOTHING * self._scored_tokens + tokens, SMOOTHING * self._scoring_s + seconds

    def _full(self, tokens: int) -> bool:
        queued = self.tokens + self._reserved
        return queued > 0 and queued + tokens > self.limit


MAX_ATTEMPTS = 3
"""A request fails after this many replicas died while scoring it in a separate batch."""


@dataclass(frozen=True)
class ServerLimits:
    """Limits of a server.

    tokens_per_batch: maximum tokens of a forward pass. queue_tokens: maximum queued tokens. batch_deadline_s: a replica that takes longer,
    times the number of its batches in flight, counts as dead. sync_deadline_s: deadline for a restarted replica to apply a weight version.
    """

    tokens_per_batch: int
    queue_tokens: int
    batch_deadline_s: float = 600.0
    max_restarts: int = 3
    sync_deadline_s: float = 120.0


@dataclass(slots=True)
class Counters:
    """Sums since the server started.

    busy_s: seconds that replicas spent on batches. wait_s: seconds of requests from submission to answer. stall_s: seconds of pauses for
    weight updates.
    """

    requests: int = 0
    failed: int = 0
    queue_full: int = 0
    tokens: int = 0
    batches: int = 0
    retried: int = 0
    updates: int = 0
    busy_s: float = 0.0
    wait_s: float = 0.0
    stall_s: float = 0.0


class Dispatcher:
    """Sends the queue's batches to replicas. Call `dispatch_ready` after every change of the queue or the replicas."""

    def __init__(self, replicas: Replicas[Replica], limits: ServerLimits) -> None:
        self.replicas, self.limits = replicas, limits
        self.queue = BoundedQueue(limits.queue_tokens)
        self.counters = Counters()
        self._paused_at: float | None = None
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: dict[asyncio.Task[None], list[QueuedRequest]] = {}
        self._ended_at: dict[int, float] = {}

    def available_versions(self) -> list[int]:
        """Weight versions that at least one replica has."""
        return sorted({version for _, replica in self.replicas.live() for version in replica.versions})

    async def pause(self) -> None:
        """Stop sending batches, and wait for those in flight."""
        if self._paused_at is None:
            self._paused_at = time.monotonic()
        await self._idle.wait()

    def resume(self) -> float:
        """Continue sending batches. Returns the seconds since the pause, which count as stall; 0 if not paused."""
        stall = 0.0
        if self._paused_at is not None:
            stall = time.monotonic() - self._paused_at
        self._paused_at = None
        self.counters.stall_s += stall
        self.dispatch_ready()
        return stall

    def close(self) -> None:
        """Stop sending batches, and fail all requests: queued, in flight and future ones."""
        self._closed = True
        self.dispatch_ready()
        for task, batch in list(self._tasks.items()):
            task.cancel()
            for item in batch:  # A task that is cancelled before it begins does not fail its batch itself.
                if not item.answer.done():
                    item.answer.set_exception(_ended_error())
        self._idle.set()

    def dispatch_ready(self) -> None:
        """Send all batches that can be sent, and fail requests that no replica will ever answer."""
        if self._closed:
            self.refuse(lambda item: True, _ended_error())
            self.queue.admit_waiters()
            return
        self._fail_unanswerable()
        while self._paused_at is None and self._send_batch():
            pass
        self.queue.admit_waiters()

    def _send_batch(self) -> bool:
        """Send one batch to the least busy replica with room. Returns False if there is none, or nothing to send."""
        live = self.replicas.live()
        free = [(slot, replica) for slot, replica in live if slot.num_requests == 0]
        batch_tokens = self.limits.tokens_per_batch
        # A batch is sent in advance only if the queue can fill it, because a smaller one should wait for more requests.
        prefetching = [(slot, replica) for slot, replica in live if slot.num_requests == 1 and self.queue.tokens >= batch_tokens]
        budget = min(batch_tokens, math.ceil(self.queue.tokens / len(free))) if free else batch_tokens
        for slot, replica in (*free, *prefetching):
            for version in replica.versions:
                batch = self.queue.take(budget, lambda r, v=version, now=replica.version: _answers_with(r, v, now))  # type: ignore[misc]
                if batch:
                    slot.num_requests += 1
                    self._idle.clear()
                    self._start(self._run(slot, replica, batch, version), batch)
                    return True
        return False

    async def _run(self, slot: Slot[Replica], replica: Replica, batch: list[QueuedRequest], version: int) -> None:
        started_at = time.monotonic()
        try:
            scoring = replica.score([item.request for item in batch], version)
            scored = await asyncio.wait_for(scoring, self.limits.batch_deadline_s * slot.num_requests)
        except (ReplicaDead, TimeoutError) as error:
            self.replicas.report_failure(slot, replica, error)
            self._requeue(batch, error, died=True)
        except Exception as error:
            # The pass failed, perhaps because a rank has died. In that case the other ranks hang in a collective and do not answer the
            # ping.
            if not await self.check_alive(slot, replica):
                self._requeue(batch, error, died=True)
            elif len(batch) > 1:
                self._requeue(batch, error, died=False)
            elif not batch[0].answer.done():
                batch[0].answer.set_exception(_caller_error(error))
        else:
            # A batch that was sent in advance starts when the previous one ends.
            started_at, now = max(started_at, self._ended_at.get(slot.index, started_at)), time.monotonic()
            seconds, self._ended_at[slot.index] = now - started_at, now
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
            slot.num_requests -= 1
            if not any(s.num_requests for s in self.replicas.slots):
                self._idle.set()
            self.dispatch_ready()

    def _requeue(self, batch: list[QueuedRequest], error: Exception, *, died: bool) -> None:
        """Requeue the requests of a failed batch at the head of the queue, each in a separate batch, to isolate the failing one."""
        for item in reversed(batch):
            if item.answer.done():
                continue
            item.attempts += died and item.isolated
            if item.attempts >= MAX_ATTEMPTS:
                item.answer.set_exception(
                    RuntimeFailure(f"{MAX_ATTEMPTS} replicas died while they scored the request; the last error: {error}")
                )
                continue
            item.isolated = True
            self.counters.retried += 1
            self.queue.put(item, first=True)

    def _fail_unanswerable(self) -> None:
        """Fail requests that no replica will ever answer."""
        if reasons := self.replicas.quarantine_reasons():
            self.refuse(lambda item: True, RuntimeFailure(f"every log-prob replica failed: {reasons}"))
            return
        available = self.available_versions()
        if not available or not self.queue.pinned:
            return

        def is_unavailable(item: QueuedRequest) -> bool:
            pinned = item.request.version
            return pinned is not None and pinned < max(available) and pinned not in available

        def is_contradictory(item: QueuedRequest) -> bool:
            pinned, at_least = item.request.version, item.request.at_least
            return pinned is not None and at_least is not None and pinned < at_least

        self.refuse(is_unavailable, VersionGone(f"version: these weights are no longer available; available versions: {available}"))
        self.refuse(is_contradictory, VersionGone("at_least: must not exceed version; leave one of the two out"))

    def refuse(self, should_refuse: Callable[[QueuedRequest], bool], error: Exception) -> None:
        """Remove requests for which `should_refuse` is true from the queue, and fail them with `error`."""
        for item in self.queue.remove(should_refuse):
            if not item.answer.done():
                item.answer.set_exception(error)

    async def check_alive(self, slot: Slot[Replica], replica: Replica) -> bool:
        """Ping a replica, and restart it if it does not answer. Returns whether it answered."""
        # The ping waits for a batch that was sent in advance. `num_requests` still includes the caller's own.
        timeout_s = RANK_DEADLINE_S + self.limits.batch_deadline_s * max(0, slot.num_requests - 1)
        try:
            await asyncio.wait_for(replica.ping(), timeout_s)
        except (ReplicaDead, TimeoutError) as error:
            self.replicas.report_failure(slot, replica, error)
            return False
        return True

    def _start(self, coroutine: Coroutine[None, None, None], batch: list[QueuedRequest]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks[task] = batch
        task.add_done_callback(self._tasks.pop)


def _caller_error(error: Exception) -> MtpctlError:
    """The error for the caller of a request that failed in a separate batch, as one line."""
    if isinstance(error, MtpctlError):
        return error
    failure = RuntimeFailure(f"scoring the request failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    failure.__cause__ = error
    return failure


def _ended_error() -> RuntimeFailure:
    return RuntimeFailure("the log-prob server has ended")


def _answers_with(request: ScoreRequest, version: int, current: int) -> bool:
    """Whether a replica with `current` weights should score the request with `version`. It uses its current weights if allowed."""
    return request.allows(version) and (version == current or not request.allows(current))
