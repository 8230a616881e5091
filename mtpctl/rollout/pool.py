"""Several engines as one `Generator`: back-pressure, partial responses, failover, and weight updates.

The pool owns a request until its sample is finished, and sends copies of it to replicas. If a replica dies, the request is sent to another
replica with the tokens that it had before this attempt. Aborted responses return with their tokens, and continue on any replica with room.

The deadline of a response covers its generation on all replicas and the time of its environment. It excludes queueing and attempts on
replicas that died. While its environment replies, a response occupies no slot, so the replica can generate other responses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

from mtpctl.cluster.replicas import Lifecycle, Log, Replicas, no_log, start_all
from mtpctl.rollout.actor import Replica
from mtpctl.rollout.protocol import ABORTED, EngineDead, EnvironmentSession, Health, SpeculationState, TurnRunner, as_completed
from mtpctl.rollout.routing import Membership, Router
from mtpctl.samples import GenerationRequest, Sample, finished_before_unwanted
from mtpctl.sync.protocol import Manifest, PauseMode, PublishedVersions, TargetDirty
from mtpctl.sync.remote import split_address, upstream_of
from mtpctl.sync.update import SyncReport, cancel_on_error

MAX_WAITING_FACTOR = 8
"""Responses that may wait for their environment without taking up capacity, as a multiple of the engines' capacity."""
GRACE_S = 60.0
"""Seconds after a request's deadline, extended by queueing and updates, after which a replica that has not answered counts as dead."""
RELAY_START_S = 5.0
"""Seconds for a replica to start its relay before an update."""

Starter = Callable[[int], Awaitable[Replica]]


class ReplicaPool:
    """Engines as one `Generator`. Create with `await ReplicaPool.start(…)`, and end with `await pool.close()`.

    `membership` adds and removes replicas.
    """

    def __init__(
        self,
        replicas: list[Replica],
        start: Starter,
        store: PublishedVersions | None,
        *,
        max_in_flight: int,
        max_restarts: int,
        sync_deadline_s: float,
        turn_runner: TurnRunner | None = None,
        use_relays: bool = False,
        log: Log = no_log,
    ) -> None:
        self._replicas = Replicas(
            replicas,
            Lifecycle(
                start=start,
                catch_up=self._catch_up,
                end=lambda replica: replica.shutdown(),
                on_change=lambda: self._router.changed.notify(),
                fatal_errors=(EngineDead, TargetDirty),
                max_restarts=max_restarts,
                end_timeout_s=GRACE_S,
                # A failed update needs the same time again to restore the old weights.
                catch_up_timeout_s=2 * sync_deadline_s,
                log=log,
            ),
        )
        self._router = Router(self._replicas, max_in_flight)
        self.membership = Membership(self._replicas, self._router.changed)
        self._store = store
        self._sync_deadline_s = sync_deadline_s
        self._turn_runner = turn_runner
        self._use_relays = use_relays
        self._admission_open = asyncio.Event()
        self._admission_open.set()
        self._num_in_progress = 0
        self._num_waiting = 0
        self._version = 0
        self._updating, self._updated_at = False, float("-inf")

    @classmethod
    async def start(
        cls,
        start: Starter,
        count: int,
        *,
        max_in_flight: int,
        store: PublishedVersions | None = None,
        max_restarts: int = 3,
        sync_deadline_s: float = 120.0,
        turn_runner: TurnRunner | None = None,
        use_relays: bool = False,
        log: Log = no_log,
    ) -> ReplicaPool:
        """Start `count` replicas concurrently with `start(index)`.

        Args:
            store: the published versions. A restarted replica applies the current one, within `sync_deadline_s`, before it serves.
            turn_runner: plays the environment between the turns of a response; if None, a response is one turn.
            use_relays: whether hosts download weights from object storage through a chain of hosts (`mtpctl.sync.remote`).
            log: receives a line for each failure and each restart of a replica.
        """
        replicas = await start_all(start, lambda replica: replica.shutdown(), count, fatal_errors=(EngineDead,), max_restarts=max_restarts)
        options = {"max_in_flight": max_in_flight, "max_restarts": max_restarts}
        return cls(
            replicas, start, store, **options, sync_deadline_s=sync_deadline_s, turn_runner=turn_runner, use_relays=use_relays, log=log
        )

    # ------------------------------------------------------------------------------------------------- generation

    async def generate(self, requests: AsyncIterable[GenerationRequest]) -> AsyncGenerator[Sample]:
        """See `Generator.generate`. Raises RuntimeFailure if every replica is in quarantine."""

        async def wait_for_room(outstanding: Callable[[], int]) -> None:
            def has_room() -> bool:
                capacity = self._router.capacity
                return outstanding() - min(self._num_waiting, MAX_WAITING_FACTOR * capacity) < capacity

            await self._router.changed.wait_for(has_room)

        async with aclosing(as_completed(requests, self.sample, wait_for_room)) as samples:
            async for sample in samples:
                self._router.changed.notify()
                yield sample

    async def sample(self, request: GenerationRequest) -> Sample:
        """Generate one finished sample, over all of its turns and across failures of replicas.

        If the request becomes unwanted, its slot is freed, and the request's sample is returned with the finish reason `abort`.
        """
        await self._admission_open.wait()
        self._num_in_progress += 1
        try:
            if request.unwanted is None:
                return await self._play_turns(request)
            task = asyncio.ensure_future(self._play_turns(request))
            if await finished_before_unwanted(task, request.unwanted):
                return task.result()
            request.sample.finish_reason = ABORTED
            return request.sample
        finally:
            self._num_in_progress -= 1
            self._router.changed.notify()

    async def _play_turns(self, request: GenerationRequest) -> Sample:
        if self._turn_runner is None:
            return await self._generate_response(request, None)
        session, sample = self._turn_runner.new_session(request), request.sample.copy()
        try:
            async with self._count_as_waiting():
                is_open = await session.open(sample)
            if is_open:
                sample = await self._generate_response(replace(request, sample=sample, stop=[*request.stop, *session.stop]), session)
            async with self._count_as_waiting():
                await session.compute_reward(sample)
            return sample
        finally:
            session.close()

    async def _generate_response(self, request: GenerationRequest, session: EnvironmentSession | None) -> Sample:
        """Generate a response over as many attempts and turns as necessary."""
        while True:
            slot = await self._router.acquire(request.sample.group_id)
            replica = slot.replica
            assert replica is not None
            try:
                sample = await self._answer(replica, request.attempt(), request.deadline_s)
            except (EngineDead, TargetDirty, TimeoutError) as error:
                self._replicas.report_failure(slot, replica, error)
                continue
            finally:
                self._router.release(slot, request.sample.group_id)
            if sample.finish_reason != ABORTED and not await self._next_turn(sample, session):
                return sample
            request = replace(request, sample=sample)

    async def _answer(self, replica: Replica, request: GenerationRequest, queue_s: float) -> Sample:
        """Generate on one replica. Raises TimeoutError if the replica is `GRACE_S` overdue, unless an update delays it.

        `queue_s`: seconds that the request may queue in the engine behind earlier requests.
        """
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def expire_or_extend() -> None:
            nonlocal timer
            earliest_timeout = (loop.time() if self._updating else self._updated_at) + GRACE_S
            if earliest_timeout > loop.time():
                timer = loop.call_at(earliest_timeout, expire_or_extend)
            else:
                limit.reschedule(loop.time())

        timer = loop.call_later(queue_s + request.deadline_s + GRACE_S, expire_or_extend)
        try:
            async with asyncio.timeout(None) as limit:
                return await replica.generate(request)
        except TimeoutError:
            if limit.expired():
                raise TimeoutError(f"no answer within {GRACE_S:g} s of its deadline") from None
            raise
        finally:
            timer.cancel()

    async def _next_turn(self, sample: Sample, session: EnvironmentSession | None) -> bool:
        """Append the environment's reply. Returns whether the model continues."""
        if session is None or sample.finish_reason != "stop":
            return False
        async with self._count_as_waiting():
            return await session.append_reply(sample)

    @asynccontextmanager
    async def _count_as_waiting(self) -> AsyncIterator[None]:
        """Count a response as waiting for its environment while the block runs, so that another one may be admitted."""
        self._num_waiting += 1
        try:
            self._router.changed.notify()
            yield
        finally:
            self._num_waiting -= 1

    # ------------------------------------------------------------------------------------------------- control

    async def _catch_up(self, replica: Replica) -> bool:
        """Update a restarted replica to the version of the others. Returns False until that version is persisted.

        A newer version may already be published. It is not applied here, because the update in progress will apply it.
        """
        if self._version:
            if self._store is None or self._version not in self._store.versions():
                return False
            manifest = self._store.open(self._version)
            await replica.update(manifest, mode="keep", verify=False, deadline_s=self._sync_deadline_s)
        return True

    @asynccontextmanager
    async def quiesce(self, mode: PauseMode = "keep") -> AsyncIterator[None]:
        """Prevent replicas from starting while the block runs. With `wait`, also finish all responses in progress, and admit no others.

        The pool waits instead of the engines, because a response may have further turns or move to another replica.
        """
        if mode == "wait":
            self._admission_open.clear()
        try:
            await self._router.changed.wait_for(lambda: mode != "wait" or not self._num_in_progress)
            async with self._replicas.fixed_members():
                yield
        finally:
            if mode == "wait":
                self._admission_open.set()

    def rank_names(self, num_ranks: int) -> list[str]:
        """A unique name for each rank of each live replica, which has `num_ranks` ranks.

        Within a `quiesce` block, `apply_update` updates exactly these replicas.
        """
        return self._replicas.rank_names("rollout", num_ranks)

    async def apply_update(
        self, manifest: Manifest, *, mode: PauseMode = "keep", verify: bool = False, deadline_s: float = 120.0
    ) -> list[SyncReport]:
        """Update all replicas to the version of `manifest` concurrently. Call it in `quiesce`.

        A replica that dies is restarted with that version. Raises SyncError if a replica refuses the update and keeps its old weights.
        """
        manifests = await self._relay_manifests(manifest)

        async def update(replica: Replica) -> SyncReport:
            # The timeout includes restoring the old weights after a failure, and pause and resume.
            timeout_s = 2 * deadline_s + GRACE_S
            try:
                replica_manifest = manifests.get(id(replica), manifest)
                return await asyncio.wait_for(replica.update(replica_manifest, mode=mode, verify=verify, deadline_s=deadline_s), timeout_s)
            except TimeoutError as error:
                raise EngineDead(f"the update to version {manifest.version} had no answer within {timeout_s:g} s") from error

        self._updating = True
        try:
            reports = await self._replicas.apply_update(lambda replica: cancel_on_error(manifest, update(replica)))
        finally:
            self._updating, self._updated_at = False, asyncio.get_running_loop().time()
        self._version = manifest.version
        return reports

    async def _relay_manifests(self, manifest: Manifest) -> dict[int, Manifest]:
        """Start relays, and return the manifests of replicas that download through them, by id of the replica.

        Replicas that do not start a relay within `RELAY_START_S` download directly.
        """
        if not self._use_relays or manifest.transport != "storage":
            return {}
        url, replicas = split_address(manifest.address)[0], [replica for _, replica in self._replicas.live()]
        calls = (asyncio.wait_for(replica.serve_relay(url), RELAY_START_S) for replica in replicas)
        results = await asyncio.gather(*calls, return_exceptions=True)
        relay_addresses = {id(replica): result for replica, result in zip(replicas, results, strict=True) if isinstance(result, str)}
        upstream_by_replica = zip(relay_addresses, upstream_of(list(relay_addresses.values())), strict=True)
        return {replica_id: replace(manifest, relay=relay, hops=hops) for replica_id, (relay, hops) in upstream_by_replica}

    async def update(
        self, manifest: Manifest, *, mode: PauseMode = "keep", verify: bool = False, deadline_s: float = 120.0
    ) -> list[SyncReport]:
        """`quiesce` and `apply_update`."""
        async with self.quiesce(mode):
            return await self.apply_update(manifest, mode=mode, verify=verify, deadline_s=deadline_s)

    async def control_speculation(self, drafts: int | None = None) -> list[SpeculationState]:
        """See `Generator.control_speculation`; one entry per live replica."""
        return await self._replicas.call_each(lambda replica: replica.control_speculation(drafts))

    async def set_immediate_admission(self, enabled: bool) -> None:
        """See `VllmEngine.set_immediate_admission`, for all live replicas."""
        await self._replicas.call_each(lambda replica: replica.set_immediate_admission(enabled))

    async def pids(self) -> list[int]:
        """The process ids of the live replicas' actors."""
        return await self._replicas.call_each(lambda replica: replica.pid())

    async def health(self) -> list[Health]:
        """One entry per replica, including failed ones."""
        entries = []
        for slot in self._replicas.slots:
            if slot.state == "vacant":
                continue
            if slot.replica is None:
                state = "in quarantine" if slot.is_quarantined else "restarting"
                entries.append(Health(alive=False, in_flight=slot.num_requests, reason=f"{state} after {slot.reason}"))
                continue
            try:
                entries.append(await slot.replica.health())
            except EngineDead as error:
                entries.append(Health(alive=False, reason=str(error)))
        return entries

    async def close(self) -> None:
        """End every replica, and close the remaining environments."""
        await self._replicas.close()
        if self._turn_runner is not None:
            await self._turn_runner.close()
