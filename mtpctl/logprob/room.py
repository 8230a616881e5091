"""The queue with a bound on its tokens: requests wait for room in it, or are told when to try again."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass

from mtpctl.logprob.protocol import QueueFull
from mtpctl.logprob.queue import FairQueue

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
