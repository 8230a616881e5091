"""Several engines as one `Generator`: routing, back-pressure, partial responses, and replicas that die.

A request belongs to the pool until its sample is finished. A replica gets a copy, so nothing is lost with a replica that dies: the
request goes to another one, with the tokens that it had when it was sent. Responses that `pause("abort")` ends come back with their
tokens, wait for `resume`, and are continued on any replica that has room. A response's deadline counts the time in which it is
generated, over all of its turns and replicas, and that of its environment. It does not count waiting, nor time on a replica that died,
whose tokens are lost. While its environment replies, a response has no place on a replica, and others are generated.

A group's samples share their prompt, so they go to the replica that has the prompt cached, unless that one has `AFFINITY_SLACK`
more responses in flight than the least busy replica.
Replicas may join and leave while the pool generates (`membership.py`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from mtpctl.cluster.deadlines import finished_before
from mtpctl.cluster.replicas import Lifecycle, Log, Replicas, Slot, no_log, start_all
from mtpctl.errors import RuntimeFailure
from mtpctl.rollout.actor import Replica
from mtpctl.rollout.membership import Membership
from mtpctl.rollout.protocol import ABORTED, EngineDead, EnvironmentSession, Health, SpecStats, SpeculationState, TurnRunner
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.sync.protocol import Manifest, PauseMode, Published, TargetDirty
from mtpctl.sync.update import SyncReport, cancel_on_error

AFFINITY_SLACK = 8
WITH_ENVIRONMENT = 8
"""Responses that may be with their environment at once, for each one that the engines may have in flight."""
GRACE_S = 60.0
"""Seconds after which a replica counts as dead that has not answered by its deadline, waits for a place and for updates included."""

Starter = Callable[[int], Awaitable[Replica]]


class ReplicaPool:
    """Engines as one `Generator`. Build with `await ReplicaPool.start(…)`, and end with `await pool.close()`.

    `membership`: which replicas there are; through it they join and leave.
    """

    def __init__(
        self,
        replicas: list[Replica],
        start: Starter,
        published: Published | None,
        *,
        max_in_flight: int,
        max_restarts: int,
        sync_deadline_s: float,
        turns: TurnRunner | None = None,
        tell: Log = no_log,
    ) -> None:
        self._replicas = Replicas(
            replicas,
            Lifecycle(
                start=start,
                bring_up=self._bring_up,
                end=lambda replica: replica.shutdown(),
                changed=self._changed,
                dead=(EngineDead, TargetDirty),
                max_restarts=max_restarts,
                end_s=GRACE_S,
                # An update that fails has as long again to restore the old weights.
                bring_up_s=2 * sync_deadline_s,
                log=tell,
            ),
        )
        self._published = published
        self._sync_deadline_s = sync_deadline_s
        self._max_in_flight = max_in_flight
        self._turns = turns
        self._groups: Counter[tuple[int, str]] = Counter()
        self._running, self._admitting = asyncio.Event(), asyncio.Event()
        self._running.set()
        self._admitting.set()
        self._under_way = 0
        self._with_environment = 0
        self._room = asyncio.Condition()
        self.membership = Membership(self._replicas, self._room)
        self._paused: PauseMode | None = None
        self._version = 0
        self._updating, self._updated_at = False, float("-inf")

    @classmethod
    async def start(
        cls,
        start: Starter,
        count: int,
        *,
        max_in_flight: int,
        published: Published | None = None,
        max_restarts: int = 3,
        sync_deadline_s: float = 120.0,
        turns: TurnRunner | None = None,
        tell: Log = no_log,
    ) -> ReplicaPool:
        """Start `count` replicas with `start(index)`, all at once.

        `published`: where a restarted replica finds the version that the others serve; it applies that within `sync_deadline_s` before
        it serves. `turns` plays the environment between the turns of a response; None: a response is one turn. `tell` is given a line for
        each failure of a replica, and for each that is back.
        """
        replicas = await start_all(start, lambda replica: replica.shutdown(), count, dead=(EngineDead,), max_restarts=max_restarts)
        options = {"max_in_flight": max_in_flight, "max_restarts": max_restarts}
        return cls(replicas, start, published, **options, sync_deadline_s=sync_deadline_s, turns=turns, tell=tell)

    # ------------------------------------------------------------------------------------------------- generation

    async def generate(self, requests: AsyncIterable[GenerationRequest]) -> AsyncGenerator[Sample]:
        """Generate as `Generator.generate` says. Raises RuntimeFailure when every replica is in quarantine."""
        done: asyncio.Queue[Sample | BaseException | None] = asyncio.Queue()
        tasks: set[asyncio.Task[None]] = set()
        outstanding = 0

        async def one(request: GenerationRequest) -> None:
            try:
                done.put_nowait(await self.sample(request))
            except Exception as error:
                done.put_nowait(error)

        def has_room() -> bool:
            capacity = self._capacity()
            return outstanding - min(self._with_environment, WITH_ENVIRONMENT * capacity) < capacity

        async def admit() -> None:
            nonlocal outstanding
            try:
                async for request in requests:
                    outstanding += 1
                    tasks.add(task := asyncio.create_task(one(request)))
                    task.add_done_callback(tasks.discard)
                    async with self._room:
                        await self._room.wait_for(has_room)
                done.put_nowait(None)
            except Exception as error:
                done.put_nowait(error)

        admission = asyncio.create_task(admit())
        admitting = True
        try:
            while admitting or outstanding:
                result = await done.get()
                if isinstance(result, BaseException):
                    raise result
                if result is None:
                    admitting = False
                    continue
                outstanding -= 1
                async with self._room:
                    self._room.notify_all()
                yield result
        finally:
            for task in (admission, *tasks):
                task.cancel()

    async def sample(self, request: GenerationRequest) -> Sample:
        """One request's finished sample, over all of its turns and whatever replicas die on the way."""
        await self._admitting.wait()
        self._under_way += 1
        try:
            return await self._while_wanted(request)
        finally:
            self._under_way -= 1
            await self._changed()

    async def _while_wanted(self, request: GenerationRequest) -> Sample:
        """The finished sample; the request's own as soon as it is unwanted, and then its place on the replica is freed."""
        if request.unwanted is None:
            return await self._whole(request)
        whole = asyncio.ensure_future(self._whole(request))
        if await finished_before(whole, request.unwanted):
            return whole.result()
        request.sample.finish_reason = ABORTED
        return request.sample

    async def _whole(self, request: GenerationRequest) -> Sample:
        if self._turns is None:
            return await self._generated(request, None)
        play, sample = self._turns.play(request), request.sample.copy()
        try:
            async with self._beside_engines():
                opened = await play.open(sample)
            if opened:
                sample = await self._generated(replace(request, sample=sample, stop=[*request.stop, *play.stop]), play)
            async with self._beside_engines():
                await play.settle(sample)
            return sample
        finally:
            play.close()

    async def _generated(self, request: GenerationRequest, play: EnvironmentSession | None) -> Sample:
        """The sample of a response that is generated as often, and with as many turns, as it takes."""
        while True:
            await self._running.wait()
            slot = await self._take(request.sample.group_id)
            replica = slot.replica
            assert replica is not None
            left = max(request.deadline_s - request.sample.spent_s, 0.0)
            attempt = replace(request, sample=request.sample.copy(), deadline_s=left, unwanted=None, problem=None)
            try:
                sample = await self._answer(replica, attempt, request.deadline_s)
            except (EngineDead, TargetDirty, TimeoutError) as error:
                self._replicas.lost(slot, replica, error)
                continue
            finally:
                await self._give(slot, request.sample.group_id)
            if sample.finish_reason != ABORTED and not await self._next_turn(sample, play):
                return sample
            request = replace(request, sample=sample)

    async def _answer(self, replica: Replica, request: GenerationRequest, wait_s: float) -> Sample:
        """The replica's answer. Raises TimeoutError where it is `GRACE_S` overdue and no update has delayed it.

        `wait_s`: seconds that the request may wait for a place in the engine, where the requests before it have deadlines of their own.
        """
        clock = asyncio.get_running_loop().time
        answer = asyncio.ensure_future(replica.generate(request))
        until = clock() + wait_s + request.deadline_s + GRACE_S
        try:
            while not (await asyncio.wait([answer], timeout=until - clock()))[0]:
                until = (clock() if self._updating else self._updated_at) + GRACE_S
                if until <= clock():
                    raise TimeoutError(f"no answer within {GRACE_S:g} s of its deadline")
            return answer.result()
        finally:
            answer.cancel()

    async def _next_turn(self, sample: Sample, play: EnvironmentSession | None) -> bool:
        """Append the environment's reply; returns whether the model goes on."""
        if play is None or sample.finish_reason != "stop":
            return False
        async with self._beside_engines():
            return await play.go_on(sample)

    @asynccontextmanager
    async def _beside_engines(self) -> AsyncIterator[None]:
        """While the block runs, a response is with its environment, and another one may take its place."""
        self._with_environment += 1
        try:
            await self._changed()
            yield
        finally:
            self._with_environment -= 1

    async def _take(self, group: str) -> Slot[Replica]:
        """Wait for a replica with room, and take a place on it."""
        async with self._room:
            await self._room.wait_for(lambda: self._free() or self._replicas.all_quarantined())
            if reasons := self._replicas.all_quarantined():
                raise RuntimeFailure(f"every rollout replica failed: {reasons}")
            free = self._free()
            least = min(free, key=lambda slot: slot.busy)
            near = [slot for slot in free if self._groups[slot.index, group] and slot.busy <= least.busy + AFFINITY_SLACK]
            chosen = min(near, key=lambda slot: slot.busy, default=least)
            chosen.busy += 1
            self._groups[chosen.index, group] += 1
            return chosen

    async def _give(self, slot: Slot[Replica], group: str) -> None:
        # Before the first await, at which a caller that is being cancelled may be cancelled again.
        slot.busy -= 1
        self._groups[slot.index, group] -= 1
        if not self._groups[slot.index, group]:
            del self._groups[slot.index, group]
        await self._changed()

    def _capacity(self) -> int:
        """Responses that may be in flight at once; at least one, so that a pool without replicas gets to raise its error."""
        return max(self._max_in_flight * self.membership.serving, 1)

    def _free(self) -> list[Slot[Replica]]:
        return [slot for slot, _ in self._replicas.live() if slot.wanted and slot.busy < self._max_in_flight]

    async def _changed(self) -> None:
        async with self._room:
            self._room.notify_all()

    async def _bring_up(self, fresh: Replica) -> bool:
        """Apply the version that the others serve to a restarted replica, and pause it if they are paused; False until that is persisted.

        A newer version may be published already; applying that one is left to the update that is under way.
        """
        if self._version and (self._published is None or self._version not in self._published.versions()):
            return False
        if self._paused is not None:
            await fresh.pause(self._paused)
        if self._version:
            assert self._published is not None
            manifest = self._published.open(self._version)
            await fresh.update(manifest, mode="keep", verify=False, deadline_s=self._sync_deadline_s)
        return True

    # ------------------------------------------------------------------------------------------------- control

    @asynccontextmanager
    async def quiesce(self, mode: PauseMode = "keep") -> AsyncIterator[None]:
        """Start no replica while the block runs, and with `wait` no response either, once those under way have ended.

        The pool waits for those responses, not the engines: in the pool each has its own deadline, moves to another replica if its own
        dies, and may have further turns.
        """
        if mode == "wait":
            self._admitting.clear()
        try:
            async with self._room:
                await self._room.wait_for(lambda: mode != "wait" or not self._under_way)
            async with self._replicas.fixed_members():
                yield
        finally:
            if mode == "wait":
                self._admitting.set()

    def members(self, ranks: int) -> list[str]:
        """A name for each rank of each live replica, which has `ranks` of them; no name is ever used twice.

        Within `quiesce`, `apply_update` goes to exactly these replicas.
        """
        return self._replicas.members("rollout", ranks)

    async def apply_update(
        self, manifest: Manifest, *, mode: PauseMode = "keep", verify: bool = False, deadline_s: float = 120.0
    ) -> list[SyncReport]:
        """Within `quiesce`: update all replicas to the version of `manifest`, at once. One that dies on the way is restarted with it.

        Raises SyncError where a replica refuses the update and still has its old weights.
        """

        async def update(replica: Replica) -> SyncReport:
            # As long for the update as for a way back from it, and a while to pause and to resume.
            seconds = 2 * deadline_s + GRACE_S
            try:
                return await asyncio.wait_for(replica.update(manifest, mode=mode, verify=verify, deadline_s=deadline_s), seconds)
            except TimeoutError as error:
                raise EngineDead(f"the update to version {manifest.version} had no answer within {seconds:g} s") from error

        self._updating = True
        try:
            reports = await self._replicas.apply_update(lambda replica: cancel_on_error(manifest, update(replica)))
        finally:
            self._updating, self._updated_at = False, asyncio.get_running_loop().time()
        self._version = manifest.version
        return reports

    async def update(
        self, manifest: Manifest, *, mode: PauseMode = "keep", verify: bool = False, deadline_s: float = 120.0
    ) -> list[SyncReport]:
        """Quiesce, and apply the update."""
        async with self.quiesce(mode):
            return await self.apply_update(manifest, mode=mode, verify=verify, deadline_s=deadline_s)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Pause every replica, as `Generator.pause` says. Aborted requests wait in the pool for `resume`."""
        async with self._replicas.updating:
            self._paused = mode
            self._running.clear()
            await self._replicas.each(lambda replica: replica.pause(mode))

    async def resume(self) -> None:
        async with self._replicas.updating:
            self._paused = None
            try:
                await self._replicas.each(lambda replica: replica.resume())
            finally:
                # Also where one of them refuses: the others go on, with the requests that wait here.
                self._running.set()

    async def spec_stats(self) -> SpecStats:
        """Speculation counts, summed over the replicas that are alive."""
        total = SpecStats()
        for stats in await self._replicas.each(lambda replica: replica.spec_stats()):
            total.add(stats)
        return total

    async def speculate(self, drafts: int | None = None) -> list[SpeculationState]:
        """Set the number of draft tokens, as `Generator.speculate` says; one entry for each replica that is alive."""
        return await self._replicas.each(lambda replica: replica.speculate(drafts))

    async def health(self) -> list[Health]:
        """One entry for each replica, dead ones included."""
        found = []
        for slot in self._replicas.slots:
            if slot.state == "vacant":
                continue
            if slot.replica is None:
                state = "in quarantine" if slot.quarantined else "restarting"
                found.append(Health(alive=False, in_flight=slot.busy, reason=f"{state} after {slot.reason}"))
                continue
            try:
                found.append(await slot.replica.health())
            except EngineDead as error:
                found.append(Health(alive=False, reason=str(error)))
        return found

    async def close(self) -> None:
        """End every replica, and close the environments that are left."""
        await self._replicas.close()
        if self._turns is not None:
            await self._turns.close()
