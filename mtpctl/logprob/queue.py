"""The queue of requests, and which of them make the next batch, without clocks or tasks.

Callers share the server by tokens: each has a queue of its own and an account of the tokens it was served, and the next
request is that of the caller with the smallest account (start-time fair queueing, Goyal et al. 1996). A caller that comes back after a
pause starts level with the others, so no caller saves up a share. A batch is filled up to its budget; a request that does not fit waits
at the head of its queue and is first in the next batch, so that a long request does not wait forever.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mtpctl.logprob.protocol import Scored, ScoreRequest

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
