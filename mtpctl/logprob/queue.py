"""The queue of requests, and which of them make the next batch, without clocks or tasks.

Callers share the server by tokens: each has a queue of its own and an account of the tokens it was served, and the next
request is that of the caller with the smallest account (start-time fair queueing, Goyal et al. 1996). A caller that comes back after a
pause starts level with the others, so no caller saves up a share. A batch is filled up to its budget; a request that does not fit waits
at the head of its queue and is first in the next batch, so that a long request does not wait forever.
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
"""Number of callers above which the accounts of those without requests are dropped."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A request in the queue. The caller awaits `answer`. `alone`: it gets a batch of its own, because a pass with it failed;
    `attempts`: replicas that died over such a batch."""

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
    """Requests by caller. `tokens` and `requests` count those that wait, `pinned` the requests for one version alone."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._level = 0.0
        self.tokens = 0
        self.requests = 0
        self.pinned = 0

    def put(self, item: Waiting, *, first: bool = False) -> None:
        """Append to the caller's queue; with `first` put at its head, where a request of a failed batch goes back."""
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
        """Take out the next batch: the requests that are `ready` and fit into `budget` tokens, or a single one that is longer."""
        batch: list[Waiting] = []
        room = budget
        turns = [(line.account, caller) for caller, line in self._lines.items() if line.waiting]
        heapq.heapify(turns)
        while turns:
            _, caller = heapq.heappop(turns)
            line = self._lines[caller]
            place = next((i for i, item in enumerate(line.waiting) if ready(item.request)), None)
            if place is None:
                continue
            item = line.waiting[place]
            if batch and (item.tokens > room or item.alone):
                continue
            del line.waiting[place]
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
        """Take out the requests for which `unwanted` holds."""
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


# The queue with a bound on its tokens: requests wait for room in it, or are told when to try again.

SMOOTHING = 0.8
"""Factor by which the running sums of the replicas' tokens and seconds decay with every batch."""


@dataclass(slots=True, eq=False)
class _Room:
    tokens: int
    granted: asyncio.Future[None]
    given: bool = False


class BoundedQueue(FairQueue):
    """A `FairQueue` in which `limit` tokens may wait; when empty it accepts one request of any size."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.granted = 0
        self.rooms: deque[_Room] = deque()
        self._tokens = self._seconds = 0.0

    def check_room(self, tokens: int) -> None:
        """Raise QueueFull where there is no room for `tokens` more."""
        if self._full(tokens):
            over = self.tokens + min(tokens, self.limit) - self.limit
            raise QueueFull(self.tokens, float(max(1, math.ceil(over * self._seconds / self._tokens))) if self._tokens else 1.0)

    async def wait_for_room(self, tokens: int) -> None:
        """Return when there is room for `tokens` more. The caller must `put` them at once: the room is not reserved any longer."""
        if not self.rooms and not self._full(tokens):
            return
        room = _Room(tokens, asyncio.get_running_loop().create_future())
        self.rooms.append(room)
        try:
            await room.granted
        finally:
            if room.given:
                self.granted -= room.tokens
            else:
                self.rooms.remove(room)

    def give_room(self) -> None:
        """Give room to those who wait for it, in turn, as far as there is some. Call it whenever a request has left."""
        while self.rooms and not self._full(self.rooms[0].tokens):
            room = self.rooms.popleft()
            room.given = True
            self.granted += room.tokens
            if not room.granted.done():
                room.granted.set_result(None)

    def served(self, tokens: int, seconds: float) -> None:
        """Note that a replica scored `tokens` in `seconds`; `QueueFull.retry_after_s` is estimated from this."""
        # Two answers may come together, the second after no time at all, so the rate of a single batch would mean nothing.
        self._tokens, self._seconds = SMOOTHING * self._tokens + tokens, SMOOTHING * self._seconds + seconds

    def _full(self, tokens: int) -> bool:
        waiting = self.tokens + self.granted
        return waiting > 0 and waiting + tokens > self.limit
