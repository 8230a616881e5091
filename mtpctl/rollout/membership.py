"""Which replicas a pool has, and how they join it and leave it while it generates.

A replica that joins takes the version that the others serve, and only then gets requests. One that leaves gets none any more; what it has
under way is aborted and goes on elsewhere with its tokens, as responses do that an update aborts.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from mtpctl.cluster.replicas import Replicas, Seat
from mtpctl.rollout.actor import Replica

HAND_OVER_S = 60.0
"""Seconds in which a replica that leaves returns what it has under way."""
ABORTING_S = 1.0
"""Seconds after which a replica that leaves is told again to abort its responses: a request may have been on its way to it."""


class Membership:
    """The seats of a pool, by their index. `room` is notified where a replica has answered."""

    def __init__(self, replicas: Replicas[Replica], room: asyncio.Condition) -> None:
        self._replicas, self._room = replicas, room

    @property
    def serving(self) -> int:
        """Replicas that take requests."""
        return sum(seat.state == "serving" for seat in self._replicas.seats)

    @property
    def taken(self) -> list[int]:
        """The seats in which a replica serves, is being started, or failed too often; first those that are missed least."""
        use = {"quarantined": 0, "restarting": 1, "serving": 2}
        wanted = [seat for seat in self._replicas.seats if seat.wanted]
        return [seat.index for seat in sorted(wanted, key=lambda seat: (use[seat.state], -seat.index))]

    def serves(self, index: int) -> bool:
        """Whether the replica in a seat takes requests."""
        return self._replicas.seats[index].state == "serving"

    @property
    def restarts(self) -> int:
        """Replicas that were started in the place of one that failed."""
        return self._replicas.restarts

    def join(self, index: int) -> None:
        """Have a replica start in a seat that is vacant, or in the next new one."""
        self._replicas.join(index)

    async def leave(self, index: int) -> None:
        """Have the replica in a seat leave, and return once it has ended."""
        await self._replicas.leave(index, self._hand_over)

    async def _hand_over(self, seat: Seat[Replica], replica: Replica) -> None:
        """Abort what a replica has under way, and wait until that has come back. After `HAND_OVER_S` the rest is lost with the replica."""
        async with asyncio.timeout(HAND_OVER_S):
            while seat.busy:
                await asyncio.sleep(0)  # for requests that are on their way
                await replica.pause("abort")
                with suppress(TimeoutError):
                    async with asyncio.timeout(ABORTING_S), self._room:
                        await self._room.wait_for(lambda: not seat.busy)
