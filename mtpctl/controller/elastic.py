"""Keeps as many rollout replicas as are asked for, as far as hosts have room, while a run goes on (`rollout.replicas: {min, max}`).

A look every second: answer what `mtpctl scale` asks, have replicas leave whose host is gone or is being drained, have those leave that are
too many, and where some are missing have one join on each place that a host has for it. Replicas join and leave beside the loop, which
learns of it by the pool's capacity alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from mtpctl.cluster.deadlines import one_line
from mtpctl.cluster.hosts import draining, living
from mtpctl.cluster.seats import Claim, Seats
from mtpctl.controller.state import RunState
from mtpctl.controller.waits import Waits
from mtpctl.errors import UserError
from mtpctl.recipe.rollout import RolloutBase, check_scale
from mtpctl.rollout.membership import Membership
from mtpctl.telemetry.requests import Answer, forget_requests, take_requests
from mtpctl.telemetry.run_directory import RunDirectory

LOOK_S = 1.0


class ElasticRollout:
    """Takes requests while it is `watching`, and has replicas follow them while it is `following` a pool.

    `asked`: the number of replicas to have; at first as many as the recipe allows.
    `on_wait` is called at each look at which fewer than `rollout.replicas.min` replicas have a host: what waits for responses must not take
    that for a failure. While the trainer is started anew no replica joins, so that what is free is the trainer's.
    """

    def __init__(
        self, rollout: RolloutBase, directory: RunDirectory, seats: Seats, state: RunState, waits: Waits, tell: Callable[[str], None]
    ) -> None:
        self.rollout, self.asked = rollout, rollout.replica_range.max
        self.on_wait: Callable[[], None] = lambda: None
        self._directory, self._seats, self._state, self._waits, self._tell = directory, seats, state, waits, tell
        self._membership: Membership | None = None
        self._claim = Claim("", 0.0)
        self._looking_for_room: asyncio.Task[None] | None = None
        self._joining = set[int]()
        self._leaving: dict[int, asyncio.Task[None]] = {}
        self._waiting = contextlib.ExitStack()
        self._waits_for_room = False

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Look every second while the block runs. Raises at its end what looking raised."""
        forget_requests(self._directory)
        task = asyncio.create_task(self._run(), name="elastic rollout")
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    @contextlib.asynccontextmanager
    async def following(self, membership: Membership, claim: Claim) -> AsyncIterator[None]:
        """Have replicas join and leave a pool while the block runs. `claim`: what each of them takes."""
        self._membership, self._claim = membership, claim
        try:
            yield
        finally:
            self._membership = None
            under_way = [*self._leaving.values()] + ([] if self._looking_for_room is None else [self._looking_for_room])
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _run(self) -> None:
        try:
            while True:
                self._answer_requests()
                if self._membership is not None:
                    self._look(self._membership)
                await asyncio.sleep(LOOK_S)
        except Exception as error:
            self._tell(f"replicas neither join nor leave any more: {one_line(error)}")
            raise

    def _answer_requests(self) -> None:
        for request in take_requests(self._directory):
            try:
                check_scale(self.rollout, request.replicas)
            except UserError as refusal:
                request.answer(Answer(str(refusal), refused=True))
                continue
            self.asked = request.replicas
            serving = 0 if self._membership is None else self._membership.serving
            told = f"{self.asked} replica(s) are asked for, and {serving} serve"
            self._tell(told)
            request.answer(Answer(told))

    def _look(self, membership: Membership) -> None:
        alive, drained = living(), draining()
        for index in membership.taken:
            node = self._seats.seats[_actor(index)].node
            if node not in alive or node in drained:
                self._leave(membership, index, "its host is being drained" if node in alive else "its host is gone")
        for index in membership.taken[: -self.asked]:
            self._leave(membership, index, f"{self.asked} are asked for")
        for index in [index for index in self._joining if membership.serves(index)]:
            self._tell(f"replica {index} serves")
            self._joining.remove(index)
        # Beside the looks: a place that somebody else was faster to take is refused after a while only.
        if (looking := self._looking_for_room) is None or looking.done():
            if looking is not None:
                looking.result()
            self._looking_for_room = asyncio.create_task(self._join(membership))
        self._show_wait(len(membership.taken))

    def _leave(self, membership: Membership, index: int, why: str) -> None:
        if index not in self._leaving:
            self._tell(f"replica {index} leaves: {why}")
            self._joining.discard(index)
            self._leaving[index] = asyncio.create_task(self._left(membership, index))

    async def _left(self, membership: Membership, index: int) -> None:
        try:
            await membership.leave(index)
            self._tell(f"replica {index} has left")
        except Exception as error:  # It has ended all the same, and its requests go on elsewhere.
            self._tell(f"replica {index} left in disorder: {one_line(error)}")
        finally:
            del self._leaving[index]
            self._seats.give_up(_actor(index))

    async def _join(self, membership: Membership) -> None:
        """Have as many replicas join as are missing, until no host has room for another one."""
        while len(membership.taken) < self.asked and not self._state.lost:
            index = next(i for i in range(self.asked + len(self._leaving)) if i not in membership.taken and i not in self._leaving)
            actor = _actor(index)
            if await self._seats.add(Claim(actor, self._claim.cpus, self._claim.gpus)) is None:
                return
            self._tell(f"replica {index} joins, on host {self._seats.host(actor)}")
            membership.join(index)
            self._joining.add(index)

    def _show_wait(self, placed: int) -> None:
        """Show that the run waits for hosts as long as fewer than the least number of replicas have one."""
        least = self.rollout.replica_range.min
        if placed < least:
            self.on_wait()
        if (placed < least) != self._waits_for_room:
            self._waits_for_room = placed < least
            if self._waits_for_room:
                told = f"rollout: {placed} of at least {least} replica(s) have a host (rollout.replicas.min), waiting for room"
                self._waiting.enter_context(self._waits.on(told))
            else:
                self._waiting.close()


def _actor(index: int) -> str:
    """The name of a replica's seat in the plan."""
    return f"rollout-{index}"
