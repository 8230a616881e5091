"""The queue of requests: which requests form the next batch, and the limit on queued tokens.

Callers share the server by tokens: each has its own queue and an account of the tokens it was served, and the next request is that of the
caller with the smallest account (start-time fair queueing, Goyal et al. 1996). A caller that returns after a pause starts level with the
others, so no caller saves up a share. A batch is filled up to its budget. A request that does not fit waits at the head of its queue and
is first in the next batch, so a long request does not wait forever.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mtpctl.logprob.protocol import QueueFull, Scored, ScoreRequest

CALLERS = 1024
"""Number of callers above which accounts without requests are dropped."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A queued request; the caller awaits `answer`.

    `alone`: it gets a separate batch, because a pass with it failed. `attempts`: replicas that died over such a batch.
    """

    request: ScoreRequest
    answer: asyncio.Future[Scored]
    attempts: int = 0
    alone: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of its forward pass."""
        return self.request.tokens


@dataclass(slots=True)
class _Line:
    account: float
    waiting: deque[Waiting] = field(default_factory=deque)


class FairQueue:
    """Requests by caller. `tokens`, `requests` and `pinned` (requests for a specific version) are totals over the queue."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._level = 0.0
        self.tokens = 0
        self.requests = 0
        self.pinned = 0

    def put(self, item: Waiting, *, first: bool = False) -> None:
        """Append to the caller's queue. With `first`, insert at its head: for the requests of a failed batch."""
        caller = item.request.caller
        line = self._lines.setdefault(caller, _Line(self._level))
        if first:
            line.waiting.appendleft(item)
            line.account -= item.tokens
        else:
            if not line.waiting:
                line.account = max(line.account, self._level)
            line.waiting.append(item)
        self._count(item, 1)

    def take(self, budget: int, ready: Callable[[ScoreRequest], bool]) -> list[Waiting]:
        """Remove and return the next batch: `ready` requests within `budget` tokens, or a single longer one."""
        batch: list[Waiting] = []
        room = budget
        turns = [(line.account, caller) for caller, line in self._lines.items() if line.waiting]
        heapq.heapify(turns)
        while turns:
            _, caller = heapq.heappop(turns)
            line = self._lines[caller]
            index = next((i for i, item in enumerate(line.waiting) if ready(item.request)), None)
            if index is None:
                continue
            item = line.waiting[index]
            if batch and (item.tokens > room or item.alone):
                continue
            del line.waiting[index]
            self._level = max(self._level, line.account)
            line.account += item.tokens
            self._left(item)
            batch.append(item)
            room -= item.tokens
            if item.alone or room <= 0:
                break
            if line.waiting:
                heapq.heappush(turns, (line.account, caller))
        return batch

    def remove(self, unwanted: Callable[[Waiting], bool]) -> list[Waiting]:
        """Remove and return the requests for which `unwanted` is true."""
        removed = [item for item in self if unwanted(item)]
        for item in removed:
            self._lines[item.request.caller].waiting.remove(item)
            self._left(item)
        return removed

    def __iter__(self) -> Iterator[Waiting]:
        for line in self._lines.values():
            yield from line.waiting

    def _count(self, item: Waiting, sign: int) -> None:
        self.tokens += sign * item.tokens
        self.requests += sign
        self.pinned += sign * (item.request.version is not None)

    def _left(self, item: Waiting) -> None:
        self._count(item, -1)
        if not self.requests:
            self._lines.clear()
            self._level = 0.0
        elif len(self._lines) > CALLERS:
            for idle in [name for name, line in self._lines.items() if not line.waiting]:
                del self._lines[idle]


SMOOTHING = 0.8
"""Decay, per batch, of the running sums of scored tokens and seconds."""


@dataclass(slots=True, eq=False)
class _Waiter:
    tokens: int
    admitted: asyncio.Future[None]
    done: bool = False


class BoundedQueue(FairQueue):
    """A `FairQueue` of at most `limit` tokens. When empty, it accepts one request of any size."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self._reserved = 0
        self._waiters: deque[_Waiter] = deque()
        self._tokens = self._seconds = 0.0

    def check_capacity(self, tokens: int) -> None:
        """Raise QueueFull if there is no room for `tokens` more."""
        if self._full(tokens):
            over = self.tokens + min(tokens, self.limit) - self.limit
            raise QueueFull(self.tokens, float(max(1, math.ceil(over * self._seconds / self._tokens))) if self._tokens else 1.0)

    async def wait_for_room(self, tokens: int) -> None:
        """Wait for room for `tokens` more. The caller must `put` them immediately, because the room is no longer reserved."""
        if not self._waiters and not self._full(tokens):
            return
        waiter = _Waiter(tokens, asyncio.get_running_loop().create_future())
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
        # Running sums of both, because a batch that finishes together with another one takes almost no time.
        self._tokens, self._seconds = SMOOTHING * self._tokens + tokens, SMOOTHING * self._seconds + seconds

    def _full(self, tokens: int) -> bool:
        queued = self.tokens + self._reserved
        return queued > 0 and queued + tokens > self.limit
