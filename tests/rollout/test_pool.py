"""Replicas die, and no sample notices: none is lost, none doubled, and what serves again serves the current weights."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from mtpctl.cluster.rendezvous import host_store
from mtpctl.environments.environment import EnvironmentClass
from mtpctl.environments.turns import TurnSessions
from mtpctl.errors import RuntimeFailure, UserError
from mtpctl.rollout.protocol import ABORTED, DEADLINE, EngineDead
from mtpctl.samples import GenerationRequest, Sample, Unwanted
from mtpctl.sync.protocol import Manifest, SyncError
from mtpctl.sync.transports.base import Address
from mtpctl.sync.update import SyncReport
from tests.fakes.chat import NO_CHAT
from tests.fakes.engines import in_loop
from tests.fakes.fleet import MANIFESTS, Fleet, assert_all_once, collect, requests
from tests.fakes.replica import FakeReplica


class Bytes:
    """Text as its bytes."""

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode()


def turns_of(kind: type) -> TurnSessions:
    return TurnSessions(EnvironmentClass("tests:it", kind, {}), Bytes(), 8, NO_CHAT)


@in_loop
async def test_slot_is_freed_once_for_repeatedly_cancelled_requests() -> None:
    fleet = Fleet(lambda index: FakeReplica(tick_s=5))
    pool = await fleet.pool(1)
    tasks = [asyncio.ensure_future(pool.sample(request)) for request in requests(4)]
    await asyncio.sleep(0.02)
    for _ in range(2):
        for task in tasks:
            task.cancel()
        await asyncio.sleep(0)
    await asyncio.wait(tasks)
    assert [health.in_flight for health in await pool.health()] == [0] and pool._replicas.slots[0].num_requests == 0


@in_loop
async def test_unwanted_request_returns_unchanged_and_frees_its_slot() -> None:
    fleet = Fleet(lambda index: FakeReplica(tick_s=0.005))
    pool = await fleet.pool(1, max_in_flight=2)
    wanted, unwanted = requests(4), Unwanted()
    for request in wanted[:3]:  # two that are worked on, and one that waits for a place
        request.unwanted, request.max_tokens = unwanted, 1 << 20
    task = asyncio.ensure_future(collect(pool, wanted))
    await asyncio.sleep(0.05)
    assert fleet.live[0].in_flight == 2
    unwanted.set()
    samples = await asyncio.wait_for(task, 5)
    assert [sample.finish_reason for sample in samples] == [ABORTED] * 3 + ["length"]
    assert [len(sample.response_ids) for sample in samples] == [0, 0, 0, 20]
    assert pool._replicas.slots[0].num_requests == 0 and fleet.live[0].in_flight == 0


@in_loop
async def test_a_killed_replica_loses_and_doubles_nothing() -> None:
    for seed in range(20):
        dice = random.Random(seed)
        fleet = Fleet()
        pool = await fleet.pool(2)
        task = asyncio.ensure_future(collect(pool, requests(40)))
        for _ in range(2):
            await asyncio.sleep(dice.uniform(0, 0.02))
            dice.choice(fleet.live).die()
        assert_all_once(await task, 40)


@in_loop
async def test_a_restarted_replica_serves_the_newest_version() -> None:
    fleet = Fleet()
    pool = await fleet.pool(1)
    await pool.update(MANIFESTS[3])
    fleet.published.there = [MANIFESTS[3]]
    fleet.live[0].die()
    samples = await collect(pool, requests(4))
    assert_all_once(samples, 4)
    assert {span.version for sample in samples for span in sample.version_spans} == {3}
    assert len(fleet.replicas_by_slot[0]) == 2
    assert fleet.replicas_by_slot[0][0].closed


@in_loop
async def test_a_replica_that_dies_in_an_update_is_replaced_with_it() -> None:
    fleet = Fleet()
    pool = await fleet.pool(2)
    fleet.live[1].die()
    fleet.published.there = [MANIFESTS[5]]
    reports = await pool.update(MANIFESTS[5])
    assert len(reports) == 1
    while not all(health.alive for health in await pool.health()):
        await asyncio.sleep(0.005)
    assert [health.version for health in await pool.health()] == [5, 5]


@contextlib.contextmanager
def pushed(version: int, deadline_s: float = 5.0) -> Iterator[Callable[[list[str]], Manifest]]:
    """A pushed version, for so many receivers as are named: they have to meet at a sender that is there."""
    meeting = host_store("127.0.0.1")

    def announce(members: list[str]) -> Manifest:
        address = Address(meeting.host, meeting.port, f"group-{version}", len(members), deadline_s)
        return Manifest(version, "nccl", str(address), {})

    yield announce


@in_loop
async def test_replica_restarted_during_a_push_is_not_a_member() -> None:
    fleet = Fleet()
    pool = await fleet.pool(2)
    fleet.live[1].die()
    await pool.control_speculation()  # notices it
    with pushed(1) as announce:
        async with pool.quiesce():
            members = pool.rank_names(1)
            while len(fleet.replicas_by_slot[1]) < 2:
                await asyncio.sleep(0.001)
            reports = await pool.apply_update(manifest := announce(members))
    assert members == ["rollout 0.0.0"] and [report.version for report in reports] == [1]
    fleet.published.there = [replace(manifest, transport="shm")]
    while not all(health.alive for health in await pool.health()):
        await asyncio.sleep(0.005)
    assert [health.version for health in await pool.health()] == [1, 1]
    assert pool.rank_names(1) == ["rollout 0.0.0", "rollout 1.1.0"]


@in_loop
async def test_push_does_not_wait_for_a_dead_member() -> None:
    fleet = Fleet()
    pool = await fleet.pool(2)
    began = time.monotonic()
    with pushed(1, deadline_s=60.0) as announce:
        async with pool.quiesce():
            manifest = announce(pool.rank_names(1))
            fleet.live[1].die()
            await pool.control_speculation()  # notices it
            with pytest.raises(SyncError, match="a receiver of the weights gave up: the fake was killed"):
                await pool.apply_update(manifest)
    assert time.monotonic() - began < 5
    assert (await pool.health())[0].version == 0


@in_loop
async def test_pause_wait_waits_for_all_turns_on_any_replica() -> None:
    class Slow:
        stop = ()

        def __init__(self, problem: object) -> None:
            self.turns = 0

        async def reply(self, turn: str) -> str | None:
            await asyncio.sleep(0.05)
            self.turns += 1
            return "\x14" if self.turns == 1 else None

    fleet = Fleet()
    pool = await fleet.pool(1, turn_runner=turns_of(Slow))
    wanted = [GenerationRequest(Sample("p", "g", [0]), 100, stop_token_ids=[10, 30])]
    task = asyncio.ensure_future(collect(pool, wanted))
    await asyncio.sleep(0.03)
    fleet.live[0].die()
    await pool.update(MANIFESTS[1], mode="wait")
    (sample,) = await task
    assert [span.version for span in sample.version_spans] == [0] and sample.response_ids[-1] == 30
    assert [health.version for health in await pool.health()] == [1]


@in_loop
async def test_replica_that_hangs_in_an_update_is_replaced_and_others_continue() -> None:
    class Hanging(FakeReplica):
        async def update(self, manifest: Manifest, **_: Any) -> SyncReport:
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

    fleet = Fleet(lambda index: Hanging() if index == 1 and len(fleet.replicas_by_slot) < 2 else FakeReplica())
    pool = await fleet.pool(2)
    fleet.published.there = [MANIFESTS[1]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtpctl.rollout.pool.GRACE_S", 0.05)
        assert [report.version for report in await pool.update(MANIFESTS[1], deadline_s=0.05)] == [1]
    while not all(health.alive for health in await pool.health()):
        await asyncio.sleep(0.005)
    assert [health.version for health in await pool.health()] == [1, 1]


@in_loop
async def test_restarted_replica_applies_the_served_version_not_the_incoming_one() -> None:
    """What is published next is sent to all of them, and would not be new to one that has it."""
    fleet = Fleet()
    pool = await fleet.pool(2)
    fleet.published.there = [MANIFESTS[1]]
    await pool.update(MANIFESTS[1])
    fleet.published.there = [MANIFESTS[1], MANIFESTS[2]]
    fleet.live[1].die()
    await pool.control_speculation()  # notices it
    while not all(health.alive for health in await pool.health()):
        await asyncio.sleep(0.005)
    assert [health.version for health in await pool.health()] == [1, 1]
    assert len(await pool.update(MANIFESTS[2])) == 2


@in_loop
async def test_waiting_for_a_place_does_not_count_against_the_deadline() -> None:
    """As an evaluation during a rollout that occupies all slots."""
    fleet = Fleet(lambda index: FakeReplica(tick_s=0.01))
    pool = await fleet.pool(1, max_in_flight=2)
    rollout = asyncio.ensure_future(collect(pool, requests(12)))  # 1.2 s
    await asyncio.sleep(0.01)
    evaluation = requests(4, max_tokens=4)
    for request in evaluation:
        request.deadline_s = 1.0
    samples = await collect(pool, evaluation)
    assert [sample.finish_reason for sample in samples] == ["length"] * 4
    assert all(0 < sample.spent_s < 1.0 for sample in samples)
    await rollout


@in_loop
async def test_deadline_counts_all_attempts_of_a_response_together() -> None:
    fleet = Fleet(lambda index: FakeReplica(tick_s=0.005))
    pool = await fleet.pool(1)
    wanted = [GenerationRequest(Sample("p", "g", [0]), 1 << 20, deadline_s=1.0)]
    task = asyncio.ensure_future(collect(pool, wanted))
    for version in (1, 2):
        await asyncio.sleep(0.2)
        await pool.update(MANIFESTS[version], mode="abort")
        assert not task.done()
    (sample,) = await task
    assert sample.finish_reason == DEADLINE and sample.spent_s >= 1.0
    assert fleet.live[0].served == ["p"] * 3


@in_loop
async def test_environment_gets_the_rest_of_the_deadline() -> None:
    class Slow:
        stop = ()

        def __init__(self, problem: object) -> None: ...

        async def reply(self, turn: str) -> str:
            await asyncio.sleep(1.0)
            return chr(30)

    pool = await Fleet().pool(1, turn_runner=turns_of(Slow))
    wanted = [GenerationRequest(Sample("p", "g", [0]), 1 << 20, stop_token_ids=[10, 40], deadline_s=1.5)]
    (sample,) = await collect(pool, wanted)
    assert sample.finish_reason == DEADLINE
    assert sum(not mask for mask in sample.loss_mask) == 1, "the second answer was too late"


@in_loop
async def test_a_deadline_that_falls_into_a_long_update_does_not_count_against_the_replica() -> None:
    class Busy(FakeReplica):
        """Its core hears of nothing before the weights are in."""

        async def update(self, manifest: Manifest, **options: Any) -> SyncReport:
            await self.pause("keep")
            self.tick_s = 0.4
            await asyncio.sleep(0.4)
            self.tick_s = 0.0005
            return await super().update(manifest, **options)

    fleet = Fleet(lambda index: Busy())
    pool = await fleet.pool(1)
    wanted = [GenerationRequest(Sample("p", "g", [0]), 1 << 20, deadline_s=0.1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtpctl.rollout.pool.GRACE_S", 0.1)
        task = asyncio.ensure_future(collect(pool, wanted))
        await asyncio.sleep(0.02)
        await pool.update(MANIFESTS[1])
        (sample,) = await task
    assert sample.finish_reason == DEADLINE and sample.response_ids
    assert len(fleet.replicas_by_slot[0]) == 1


@in_loop
async def test_refused_update_raises() -> None:
    class Refusing(FakeReplica):
        async def update(self, manifest: Manifest, **_: Any) -> SyncReport:
            raise SyncError("lm_head.weight does not fit")

    fleet = Fleet(lambda index: Refusing() if index else FakeReplica())
    pool = await fleet.pool(2)
    with pytest.raises(SyncError, match=r"lm_head\.weight does not fit"):
        await pool.update(MANIFESTS[1])
    assert_all_once(await collect(pool, requests(4)), 4)


@in_loop
async def test_a_replica_that_keeps_failing_is_quarantined_with_its_reason() -> None:
    class Stillborn(FakeReplica):
        async def generate(self, request: GenerationRequest) -> Sample:
            raise EngineDead("no such kernel")

    fleet = Fleet(lambda index: Stillborn() if index == 1 else FakeReplica())
    pool = await fleet.pool(2, max_restarts=2)
    assert_all_once(await collect(pool, requests(60)), 60)
    while len(fleet.replicas_by_slot[1]) < 3:
        await collect(pool, requests(8))
    await collect(pool, requests(60))
    assert len(fleet.replicas_by_slot[1]) == 3
    health = (await pool.health())[1]
    assert not health.alive
    assert "in quarantine after EngineDead: no such kernel" in health.reason


@in_loop
async def test_without_any_replica_the_run_ends_with_the_reason() -> None:
    class Stillborn(FakeReplica):
        async def generate(self, request: GenerationRequest) -> Sample:
            raise EngineDead("no such kernel")

    pool = await Fleet(lambda index: Stillborn()).pool(2, max_restarts=1)
    with pytest.raises(RuntimeFailure, match="every rollout replica failed: 0: EngineDead: no such kernel"):
        await collect(pool, requests(10))


@in_loop
async def test_user_error_does_not_restart_the_replica() -> None:
    class Strict(FakeReplica):
        async def generate(self, request: GenerationRequest) -> Sample:
            raise UserError("the prompt is too long: raise rollout.context")

    fleet = Fleet(lambda index: Strict())
    pool = await fleet.pool(1)
    with pytest.raises(UserError, match=r"raise rollout\.context"):
        await collect(pool, requests(1))
    assert len(fleet.replicas_by_slot[0]) == 1


@in_loop
async def test_long_response_does_not_delay_others() -> None:
    pool = await Fleet().pool(1)
    long = GenerationRequest(Sample("long", "g", [0]), 400)
    order = [sample.prompt_id for sample in await collect(pool, [long, *requests(30)])]
    assert order[-1] == "long"


@in_loop
async def test_a_replica_that_hangs_counts_as_dead() -> None:
    class Hanging(FakeReplica):
        async def generate(self, request: GenerationRequest) -> Sample:
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

    from mtpctl.rollout import pool as module

    before, module.GRACE_S = module.GRACE_S, 0.05
    try:
        fleet = Fleet(lambda index: Hanging() if index == 1 else FakeReplica())
        pool = await fleet.pool(2, max_restarts=0)
        wanted = requests(6)
        for request in wanted:
            request.deadline_s = 0.3
        samples = await collect(pool, wanted)
        assert sorted(sample.prompt_id for sample in samples) == [f"p{index}" for index in range(6)]
        assert not (await pool.health())[1].alive
    finally:
        module.GRACE_S = before


@in_loop
async def test_close_ends_every_replica() -> None:
    fleet = Fleet()
    pool = await fleet.pool(3)
    await pool.close()
    assert all(replica.closed for replica in fleet.live)


class Relaying(FakeReplica):
    """A replica on a host with this relay, which fails if there is none, and does not answer if it is `hangs`."""

    def __init__(self, address: str | None) -> None:
        super().__init__()
        self.address = address
        self.updates: list[Manifest] = []

    async def serve_relay(self, url: str) -> str:
        assert url == "s3://bucket/run"
        if self.address is None:
            raise OSError("no free port")
        if self.address == "hangs":
            await asyncio.Event().wait()
        return self.address

    async def update(self, manifest: Manifest, **options: Any) -> SyncReport:
        self.updates.append(manifest)
        return await super().update(manifest, **options)


@in_loop
async def test_hosts_of_replicas_download_in_a_chain() -> None:
    addresses = ["10.0.0.1:1", "10.0.0.2:1", None, "10.0.0.1:2", "hangs", "10.0.0.3:1"]
    chain = [("", 0), ("10.0.0.1:1", 1), ("", 0), ("", 0), ("", 0), ("10.0.0.2:1", 2)]
    stored = Manifest(1, "storage", "s3://bucket/run/v00000001-0a", {})
    for relays, expected in ((True, chain), (False, [("", 0)] * 6)):
        fleet = Fleet(lambda index: Relaying(addresses[index]))
        pool = await fleet.pool(6, use_relays=relays)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mtpctl.rollout.pool.RELAY_START_S", 0.05)
            await pool.update(stored)
        updates = [fleet.replicas_by_slot[index][0].updates for index in range(6)]  # type: ignore[attr-defined]
        assert [(manifest.relay, manifest.hops) for (manifest,) in updates] == expected
        await pool.close()
