"""Keeps a run at the number of rollout replicas that is asked for, as far as hosts have room (`rollout.replicas: {min, max}`).

Once a second the controller answers requests of `mtpctl scale`, has those replicas leave whose host is gone or is being drained and those
that are too many, and has replicas join on hosts with room where some are missing. The trainer and the log-prob server come first: while
one of their actors waits for a host no replica joins, and after a while one leaves for it. The training loop goes on meanwhile; all that
changes for it is how many responses the pool takes at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from mtpctl.cluster.bundles import Bundles, Claim, draining, living
from mtpctl.cluster.deadlines import in_thread, one_line
from mtpctl.controller.state import RunState
from mtpctl.controller.status import Waits
from mtpctl.errors import UserError
from mtpctl.recipe.rollout import RolloutBase, check_scale
from mtpctl.rollout.routing import Membership
from mtpctl.telemetry.run_directory import RunDirectory
from mtpctl.telemetry.scale_requests import Answer, forget_requests, remember, remembered, take_requests

LOOK_S = 1.0
"""Seconds between two looks at requests and hosts."""
YIELD_S = 10.0
"""Seconds that an actor of the plan waits for a host, which may be about to join, before a replica beyond the least leaves for it."""


class ElasticRollout:
    """Answers requests inside of `watching`, and has replicas join and leave a pool inside of `following`.

    `asked`: the number of replicas to have: what `mtpctl scale` asked for last, within the recipe's bounds, or as many as these allow.
    `on_wait` is called once a second while fewer than `rollout.replicas.min` replicas have a host, so that the loop, which waits for their
    responses, does not take them for stuck.
    """

    def __init__(
        self, rollout: RolloutBase, directory: RunDirectory, bundles: Bundles, state: RunState, waits: Waits, tell: Callable[[str], None]
    ) -> None:
        self.rollout, self._before = rollout, remembered(directory)
        self.asked = rollout.replica_range.clipped(self._before) if self._before else rollout.replica_range.max
        self.on_wait: Callable[[], None] = lambda: None
        self._directory, self._bundles, self._state, self._waits, self._tell = directory, bundles, state, waits, tell
        self._membership: Membership | None = None
        self._claim = Claim("", 0.0)
        self._looking_for_room: asyncio.Task[None] | None = None
        self._joining = set[int]()
        self._leaving: dict[int, asyncio.Task[None]] = {}
        self._waiting = contextlib.ExitStack()
        self._waits_for_room = False
        self._left_at = float("-inf")

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Look once a second while the block runs. An error of a look is raised at the end of the block."""
        forget_requests(self._directory)
        if self._before:
            bounds = "" if self.asked == self._before else f", and rollout.replicas allows {self.asked}"
            self._tell(f"{self._before} replica(s) are asked for, since mtpctl scale did so before{bounds}")
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
                if self._membership is not None and not self._state.stopping.is_set():
                    # If Ray's server has ended, Ray reports it only after a minute. The run saves its checkpoint in the meantime.
                    alive, drained = await in_thread(lambda: (living(), draining()))
                    if self._membership is not None:
                        self._look(self._membership, alive, drained)
                await asyncio.sleep(LOOK_S)
        except Exception as error:
            self._tell(f"replicas neither join nor leave any more: {one_line(error)}")
            raise

    def _answer_requests(self) -> None:
        for request in take_requests(self._directory):
            answer = self._taken(request.replicas)
            try:
                request.answer(answer)
            except OSError as error:
                self._tell(f"mtpctl scale gets no answer ({error.strerror}): {answer.told}")

    def _taken(self, replicas: int) -> Answer:
        """Have this number from now on, where the recipe allows it and the run directory takes it."""
        try:
            check_scale(self.rollout, replicas)
            remember(self._directory, replicas)
        except UserError as refusal:
            return Answer(str(refusal), refused=True)
        self.asked = replicas
        serving = 0 if self._membership is None else self._membership.serving
        told = f"{self.asked} replica(s) are asked for, and {serving} serve"
        self._tell(told)
        return Answer(told)

    def _look(self, membership: Membership, alive: set[str], drained: set[str]) -> None:
        for index in membership.taken:
            node = self._bundles.by_actor[_actor(index)].node
            if node not in alive or node in drained:
                self._leave(membership, index, "its host is being drained" if node in alive else "its host is gone")
        for index in membership.taken[: -self.asked]:
            self._leave(membership, index, f"{self.asked} are asked for")
        if (actor := self._late_other()) and not self._leaving and len(membership.taken) > self.rollout.replica_range.min:
            self._leave(membership, membership.taken[0], f"{actor} has no place on any other host")
        for index in [index for index in self._joining if membership.serves(index)]:
            self._tell(f"replica {index} serves")
            self._joining.remove(index)
        # In a task of its own: where somebody else was faster, it takes Ray a while to refuse a place.
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
        except Exception as error:  # The replica has ended all the same, and its requests go on elsewhere.
            self._tell(f"replica {index} left in disorder: {one_line(error)}")
        finally:
            del self._leaving[index]
            self._bundles.release(_actor(index))
            self._left_at = time.monotonic()

    async def _join(self, membership: Membership) -> None:
        """Have replicas join until none is missing, or no host has room for another one."""
        while len(membership.taken) < self.asked and not self._state.lost and not self._others_awaited():
            index = next(i for i in range(self.asked + len(self._leaving)) if i not in membership.taken and i not in self._leaving)
            actor = _actor(index)
            if await self._bundles.add(Claim(actor, self._claim.cpus, self._claim.gpus)) is None:
                return
            self._tell(f"replica {index} joins, on host {self._bundles.host(actor)}")
            membership.join(index)
            self._joining.add(index)

    def _others_awaited(self) -> dict[str, float]:
        """The actors of the trainer and the log-prob server that wait for a place, and since when."""
        return {actor: since for actor, since in self._bundles.awaited.items() if not actor.startswith("rollout-")}

    def _late_other(self) -> str:
        """One of them whose host is gone and that has waited for `YIELD_S`, also since a replica left; empty where there is none."""
        late = time.monotonic() - YIELD_S
        lost = self._bundles.lost([actor for actor, since in self._others_awaited().items() if max(since, self._left_at) <= late])
        return lost[0] if lost else ""

    def _show_wait(self, placed: int) -> None:
        """Show that the run waits for hosts while fewer than `rollout.replicas.min` replicas have one."""
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
