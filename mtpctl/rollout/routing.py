"""Chooses the replica of a pool for each response, and adds and removes replicas."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

from mtpctl.cluster.deadlines import ChangeNotifier
from mtpctl.cluster.replicas import Replicas, Slot
from mtpctl.errors import RuntimeFailure
from mtpctl.rollout.actor import Replica

AFFINITY_SLACK = 8
"""A replica that has the prompt cached is preferred while it has at most this many more responses than the least busy one."""
HAND_OVER_S = 60.0
"""Time limit for a leaving replica to return its responses, in seconds."""
ABORT_INTERVAL_S = 1.0
"""Interval of repeated aborts on a leaving replica, in seconds. A request may have been in flight to it during the previous abort."""


class Router:
    """Chooses a replica for each response, and limits the responses of each replica to `max_in_flight`.

    The samples of a group share their prompt. A sample goes to a replica that is generating another sample of its group, and so has the
    prompt cached, unless that replica has more than `AFFINITY_SLACK` more responses than the least busy one. `changed` is notified whenever
    a slot may have become free.
    """

    def __init__(self, replicas: Replicas[Replica], max_in_flight: int) -> None:
        self._replicas, self._max_in_flight = replicas, max_in_flight
        self._groups: Counter[tuple[int, str]] = Counter()
        self.changed = ChangeNotifier()

    async def acquire(self, group: str) -> Slot[Replica]:
        """Wait until a replica has room, and count a response of `group` on it.

        Raises RuntimeFailure if all replicas are in quarantine.
        """
        await self.changed.wait_for(lambda: self._free_slots() or self._replicas.quarantine_reasons())
        if reasons := self._replicas.quarantine_reasons():
            raise RuntimeFailure(f"every rollout replica failed: {reasons}")
        free_slots = self._free_slots()
        min_requests = min(slot.num_requests for slot in free_slots)
        limit = min_requests + AFFINITY_SLACK
        group_slots = [slot for slot in free_slots if self._groups[slot.index, group] and slot.num_requests <= limit]
        chosen_slot = min(group_slots or free_slots, key=lambda slot: slot.num_requests)
        chosen_slot.num_requests += 1
        self._groups[chosen_slot.index, group] += 1
        return chosen_slot

    def release(self, slot: Slot[Replica], group: str) -> None:
        """Undo `acquire`."""
        slot.num_requests -= 1
        self._groups[slot.index, group] -= 1
        if not self._groups[slot.index, group]:
            del self._groups[slot.index, group]
        self.changed.notify()

    @property
    def capacity(self) -> int:
        """Maximum responses in flight; at least 1, so that a pool without replicas accepts a request, and `acquire` can raise its error."""
        return max(self._max_in_flight * self._replicas.num_serving, 1)

    def _free_slots(self) -> list[Slot[Replica]]:
        return [slot for slot, _ in self._replicas.live() if slot.is_occupied and slot.num_requests < self._max_in_flight]


class Membership:
    """Adds replicas to a pool and removes them, by slot index.

    A joining replica first loads the version that the others serve, and then gets requests. A leaving replica gets no further requests.
    Its responses are aborted, and other replicas continue them from their tokens, as after a weight update with `mode="abort"`.
    """

    def __init__(self, replicas: Replicas[Replica], changed: ChangeNotifier) -> None:
        self._replicas, self._changed = replicas, changed

    @property
    def num_serving(self) -> int:
        """Number of replicas that get requests."""
        return self._replicas.num_serving

    @property
    def occupied_slots(self) -> list[int]:
        """Occupied slots in the order in which to vacate them: quarantined, restarting, serving; of each state the highest index first."""
        priority = {"quarantined": 0, "restarting": 1, "serving": 2}
        occupied = [slot for slot in self._replicas.slots if slot.is_occupied]
        return [slot.index for slot in sorted(occupied, key=lambda slot: (priority[slot.state], -slot.index))]

    def is_serving(self, index: int) -> bool:
        """Whether the replica in a slot gets requests."""
        return self._replicas.slots[index].state == "serving"

    @property
    def num_restarts(self) -> int:
        """Number of replicas that were started to replace a failed one."""
        return self._replicas.num_restarts

    def join(self, index: int) -> None:
        """Start a replica in a vacant slot, or in the next new one."""
        self._replicas.join(index)

    async def leave(self, index: int) -> None:
        """Move the responses of the replica in a slot to other replicas, and stop it."""
        await self._replicas.leave(index, self._hand_over)

    async def _hand_over(self, slot: Slot[Replica], replica: Replica) -> None:
        """Abort the replica's responses until it has returned all of them. Raises TimeoutError after `HAND_OVER_S`.

        After a timeout, the pool continues the remaining responses elsewhere, from the tokens that they had when they were sent to this
        replica.
        """
        async with asyncio.timeout(HAND_OVER_S):
            while slot.num_requests:
                await asyncio.sleep(0)  # let pending requests be sent first
                await replica.pause("abort")
                with suppress(TimeoutError):
                    async with asyncio.timeout(ABORT_INTERVAL_S):
                        await self._changed.wait_for(lambda: not slot.num_requests)
