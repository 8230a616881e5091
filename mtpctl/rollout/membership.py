"""Which replicas a pool has, and how they join it and leave it while it generates.

A replica that joins first takes the version that the others serve, and then gets requests. A replica that leaves gets no further requests.
Its responses under way are aborted and continued on other replicas with the tokens that they have, like responses that a weight update
aborts.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from mtpctl.cluster.replicas import Replicas, Slot
from mtpctl.rollout.actor import Replica

HAND_OVER_S = 60.0
"""Seconds in which a replica that leaves must return its responses under way."""
ABORTING_S = 1.0
"""Seconds after which a replica that leaves is told again to abort its responses, since a request may have been on its way to it."""


class Membership:
    """The slots of a pool, by index. `room`: the condition that the pool notifies when a response comes back."""

    def __init__(self, replicas: Replicas[Replica], room: asyncio.Condition) -> None:
        self._replicas, self._room = replicas, room

    @property
    def serving(self) -> int:
        """Replicas that take requests."""
        return sum(slot.state == "serving" for slot in self._replicas.slots)

    @property
    def taken(self) -> list[int]:
        """The slots in which a replica serves, is being started or is in quarantine, in the order in which they are to be vacated.

        Quarantined slots come first, then those that start a replica, then those that serve; of these the newest slot first.
        """
        use = {"quarantined": 0, "restarting": 1, "serving": 2}
        wanted = [slot for slot in self._replicas.slots if slot.wanted]
        return [slot.index for slot in sorted(wanted, key=lambda slot: (use[slot.state], -slot.index))]

    def serves(self, index: int) -> bool:
        """Whether the replica in a slot takes requests."""
        return self._replicas.slots[index].state == "serving"

    @property
    def restarts(self) -> int:
        """Replicas that were started in the place of one that failed."""
        return self._replicas.restarts

    def join(self, index: int) -> None:
        """Have a replica start in a slot that is vacant, or in the next new one."""
        self._replicas.join(index)

    async def leave(self, index: int) -> None:
        """Have the replica in a slot leave, and return once it has ended."""
        await self._replicas.leave(index, self._hand_over)

    async def _hand_over(self, slot: Slot[Replica], replica: Replica) -> None:
        """Abort the replica's responses, and wait until they have come back. Raises TimeoutError after `HAND_OVER_S`.

        The pool then continues the remaining ones from the tokens that they had when they were sent.
        """
        async with asyncio.timeout(HAND_OVER_S):
            while slot.busy:
                await asyncio.sleep(0)  # for requests that are on their way
                await replica.pause("abort")
                with suppress(TimeoutError):
                    async with asyncio.timeout(ABORTING_S), self._room:
                        await self._room.wait_for(lambda: not slot.busy)
