"""Scales the rollout replicas of a run to the requested number, up to the capacity of the hosts (`rollout.replicas: {min, max}`).

Once a second, the controller answers requests of `mtpctl scale`, removes surplus replicas and those whose host is lost or draining, and
adds missing replicas on hosts with capacity. Training continues meanwhile. The trainer and the log-prob server take precedence: while one
of their actors waits for a host, no replica joins. If the actor has lost its host, a replica above the minimum leaves after `YIELD_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from mtpctl.cluster.bundles import Bundles, Claim, list_draining_nodes, list_live_nodes
from mtpctl.cluster.deadlines import describe_error, run_in_thread
from mtpctl.controller.state import RunState
from mtpctl.controller.status import Waits
from mtpctl.errors import UserError
from mtpctl.recipe.rollout import RolloutBase, check_scale
from mtpctl.rollout.routing import Membership
from mtpctl.telemetry.run_directory import (
    Answer,
    RunDirectory,
    last_requested_replicas,
    pop_requests,
    store_requested_replicas,
)

POLL_S = 1.0
"""Interval between checks of requests and hosts, in seconds."""
YIELD_S = 10.0
"""How long a trainer or log-prob actor that has lost its host may wait for another, in seconds. Then a replica leaves to make room."""


class ElasticRollout:
    """Answers requests inside `watch`; adds and removes replicas of a pool inside `scale`.

    Attributes:
        requested_replicas: the last number requested by `mtpctl scale`, clipped to the recipe's bounds; by default the maximum.
        on_wait: called once a second while fewer than `rollout.replicas.min` replicas have a host, so that the RL loop does not consider
            generation stuck.
    """

    def __init__(
        self, rollout: RolloutBase, directory: RunDirectory, bundles: Bundles, state: RunState, waits: Waits, report: Callable[[str], None]
    ) -> None:
        self.rollout, self._earlier_request = rollout, last_requested_replicas(directory)
        bounds = rollout.replica_range
        self.requested_replicas = bounds.clip(self._earlier_request) if self._earlier_request else bounds.max
        self.on_wait: Callable[[], None] = lambda: None
        self._directory, self._bundles, self._state, self._waits, self._report = directory, bundles, state, waits, report
        self._membership: Membership | None = None
        self._claim = Claim("", 0.0)
        self._join_task: asyncio.Task[None] | None = None
        self._joining_slots = set[int]()
        self._leave_tasks: dict[int, asyncio.Task[None]] = {}
        self._shown_wait = contextlib.ExitStack()
        self._waits_for_hosts = False
        self._last_left_at = float("-inf")

    @contextlib.asynccontextmanager
    async def watch(self) -> AsyncIterator[None]:
        """Answer requests and scale once a second while the block runs.

        If this fails, the error is raised at the end of the block, unless the block raises another one.
        """
        if self._earlier_request:
            is_clipped = self.requested_replicas != self._earlier_request
            clip_note = f", but rollout.replicas allows {self.requested_replicas}" if is_clipped else ""
            self._report(f"{self._earlier_request} replica(s) are requested, by an earlier mtpctl scale{clip_note}")
        task = asyncio.create_task(self._run(), name="elastic rollout")
        try:
            yield
        finally:
            task.cancel()
            (error,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(error, Exception):
            raise error

    @contextlib.asynccontextmanager
    async def scale(self, membership: Membership, claim: Claim) -> AsyncIterator[None]:
        """Let `watch` add and remove replicas of a pool while the block runs. `claim`: the resources of one replica."""
        self._membership, self._claim = membership, claim
        try:
            yield
        finally:
            self._membership = None
            tasks = [*self._leave_tasks.values()] + ([] if self._join_task is None else [self._join_task])
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        try:
            while True:
                self._answer_requests()
                if self._membership is not None and not self._state.stop_requested.is_set():
                    # In a thread, because Ray may block for a minute if the GCS server has ended, and the event loop must stay free to save
                    # a checkpoint.
                    live_node_ids, draining_node_ids = await run_in_thread(lambda: (list_live_nodes(), list_draining_nodes()))
                    if self._membership is not None:
                        self._reconcile(self._membership, live_node_ids, draining_node_ids)
                await asyncio.sleep(POLL_S)
        except Exception as error:
            self._report(f"replicas can no longer join or leave: {describe_error(error)}")
            raise

    def _answer_requests(self) -> None:
        for request in pop_requests(self._directory):
            answer = self._set_requested(request.replicas)
            try:
                request.answer(answer)
            except OSError as error:
                self._report(f"mtpctl scale gets no answer ({error.strerror}): {answer.message}")

    def _set_requested(self, replicas: int) -> Answer:
        """Set the requested number if the recipe allows it and it can be stored in the run directory."""
        try:
            check_scale(self.rollout, replicas)
            store_requested_replicas(self._directory, replicas)
        except UserError as refusal:
            return Answer(str(refusal), refused=True)
        self.requested_replicas = replicas
        num_serving = 0 if self._membership is None else self._membership.num_serving
        message = f"{self.requested_replicas} replica(s) are requested, and {num_serving} serve"
        self._report(message)
        return Answer(message)

    def _reconcile(self, membership: Membership, live_node_ids: set[str], draining_node_ids: set[str]) -> None:
        """Begin to remove surplus replicas and those on unusable hosts, and to add missing ones."""
        for index in membership.occupied_slots:
            node_id = self._bundles.by_actor[_actor_name(index)].node_id
            if node_id not in live_node_ids or node_id in draining_node_ids:
                self._leave(membership, index, "its host is being drained" if node_id in live_node_ids else "its host is lost")
        staying = [index for index in membership.occupied_slots if index not in self._leave_tasks]
        for index in staying[: -self.requested_replicas]:
            self._leave(membership, index, f"{self.requested_replicas} are requested")
        if (
            (actor := self._starved_actor(live_node_ids))
            and not self._leave_tasks
            and len(membership.occupied_slots) > self.rollout.replica_range.min
        ):
            self._leave(membership, membership.occupied_slots[0], f"no other host has capacity for {actor}")
        for index in [index for index in self._joining_slots if membership.is_serving(index)]:
            self._report(f"replica {index} serves")
            self._joining_slots.remove(index)
        # Joining is a separate task, because Ray takes seconds to reject a reservation if another job was faster.
        if (join_task := self._join_task) is None or join_task.done():
            if join_task is not None:
                join_task.result()
            self._join_task = asyncio.create_task(self._join(membership))
        self._show_wait(len(membership.occupied_slots))

    def _leave(self, membership: Membership, index: int, reason: str) -> None:
        if index not in self._leave_tasks:
            self._report(f"replica {index} leaves: {reason}")
            self._joining_slots.discard(index)
            self._leave_tasks[index] = asyncio.create_task(self._end_replica(membership, index))

    async def _end_replica(self, membership: Membership, index: int) -> None:
        try:
            await membership.leave(index)
            self._report(f"replica {index} has left")
        except Exception as error:  # The replica has ended anyway, and its requests continue on others.
            self._report(f"replica {index} left with an error: {describe_error(error)}")
        finally:
            del self._leave_tasks[index]
            self._bundles.release(_actor_name(index))
            self._last_left_at = time.monotonic()

    async def _join(self, membership: Membership) -> None:
        """Add replicas until none is missing, no host has capacity, or the trainer or the log-prob server needs the capacity."""
        while len(membership.occupied_slots) < self.requested_replicas and not self._state.weights_lost and not self._waiting_actors():
            index = next(
                i
                for i in range(self.requested_replicas + len(self._leave_tasks))
                if i not in membership.occupied_slots and i not in self._leave_tasks
            )
            actor = _actor_name(index)
            if await self._bundles.add(Claim(actor, self._claim.cpus, self._claim.gpus)) is None:
                return
            self._report(f"replica {index} joins, on host {self._bundles.host(actor)}")
            membership.join(index)
            self._joining_slots.add(index)

    def _waiting_actors(self) -> dict[str, float]:
        """Actors of the trainer and the log-prob server that wait for a bundle, with the start of the wait."""
        return {actor: since for actor, since in self._bundles.awaited.items() if not actor.startswith("rollout-")}

    def _starved_actor(self, live_node_ids: set[str]) -> str:
        """A trainer or log-prob actor that lost its host, and has waited `YIELD_S` since then and since a replica left; else empty."""
        latest_start = time.monotonic() - YIELD_S
        for actor, since in self._waiting_actors().items():
            is_lost = self._bundles.by_actor[actor].node_id not in live_node_ids
            if is_lost and max(since, self._last_left_at) <= latest_start:
                return actor
        return ""

    def _show_wait(self, hosted_replicas: int) -> None:
        """Show that the run waits for hosts while fewer than `rollout.replicas.min` replicas have one."""
        min_replicas = self.rollout.replica_range.min
        if hosted_replicas < min_replicas:
            self.on_wait()
        if (hosted_replicas < min_replicas) != self._waits_for_hosts:
            self._waits_for_hosts = hosted_replicas < min_replicas
            if self._waits_for_hosts:
                hosted = f"{hosted_replicas} of at least {min_replicas} replica(s) have a host (rollout.replicas.min)"
                self._shown_wait.enter_context(self._waits.show(f"rollout: {hosted}, waiting for capacity"))
            else:
                self._shown_wait.close()


def _actor_name(index: int) -> str:
    """The name of a replica in the placement."""
    return f"rollout-{index}"
