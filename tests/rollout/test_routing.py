"""Requests go to replicas by load and cached prompt. Replicas join and leave, and no token is lost, doubled or of another version."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from mtpctl.rollout.protocol import EngineDead
from mtpctl.rollout.routing import AFFINITY_SLACK, Membership
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.sync.protocol import PauseMode
from tests.fakes.engines import in_loop
from tests.fakes.fleet import MANIFESTS, Fleet, assert_all_once, collect, requests
from tests.fakes.replica import FakeReplica, next_token


async def until_serving(membership: Membership, count: int) -> None:
    async with asyncio.timeout(30):
        while membership.num_serving != count:
            await asyncio.sleep(0.002)


@in_loop
async def test_requests_are_spread_over_replicas() -> None:
    fleet = Fleet()
    pool = await fleet.pool(3)
    assert_all_once(await collect(pool, requests(60)), 60)
    served = [len(replica.served) for replica in fleet.live]
    assert min(served) > 10
    assert all(replica.most_in_flight <= 8 for replica in fleet.live)


@in_loop
async def test_a_group_stays_on_one_replica() -> None:
    fleet = Fleet()
    pool = await fleet.pool(4)
    assert_all_once(await collect(pool, requests(16, group=4)), 16)
    homes = {f"g{group}": set() for group in range(4)}
    for place, replica in enumerate(fleet.live):
        for prompt in replica.served:
            homes[f"g{int(prompt[1:]) // 4}"].add(place)
    assert all(len(places) == 1 for places in homes.values())
    assert len(set.union(*homes.values())) == 4


@in_loop
async def test_least_busy_replica_with_the_cached_prompt_is_chosen() -> None:
    """A group that exceeds one replica is spread over several, which share the remaining requests."""
    fleet = Fleet(lambda index: FakeReplica(tick_s=1))
    pool = await fleet.pool(3, max_in_flight=64)
    tasks = [asyncio.ensure_future(pool.sample(request)) for request in requests(45, group=45)]
    await asyncio.sleep(0.05)
    busy = sorted(replica.in_flight for replica in fleet.live)
    assert sum(busy) == 45 and busy[-1] - busy[0] <= AFFINITY_SLACK + 1, busy
    for task in tasks:
        task.cancel()


@in_loop
async def test_leaving_replica_hands_over_without_sampling_a_token_twice() -> None:
    fleet, sampled = Fleet(lambda index: FakeReplica(tick_s=0.001)), 0

    def count(sample: Sample) -> int:
        nonlocal sampled
        sampled += 1
        return next_token(sample)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.fakes.replica.next_token", count)
        pool = await fleet.pool(2, max_restarts=0)
        task = asyncio.ensure_future(collect(pool, requests(16, max_tokens=60)))
        await asyncio.sleep(0.03)
        leaving, staying = fleet.live
        assert leaving.in_flight and staying.in_flight
        begun = len(leaving.served)
        await pool.membership.leave(0)
        assert leaving.closed and not leaving.in_flight and len(leaving.served) == begun
        samples = await task
    assert_all_once(samples, 16, tokens=60)
    assert set(leaving.served) & set(staying.served), "some began on one and ended on the other"
    assert sampled == 16 * 60
    assert (pool.membership.occupied_slots, pool.membership.num_restarts) == ([1], 0)
    assert [health.alive for health in await pool.health()] == [True]


@in_loop
async def test_request_in_flight_to_a_leaving_replica_is_handed_over() -> None:
    class Late(FakeReplica):
        """Gets what it is sent a while later, after a first request to abort."""

        async def generate(self, request: GenerationRequest) -> Sample:
            await asyncio.sleep(0.05)
            return await super().generate(request)

    fleet = Fleet(lambda index: Late() if index == 0 else FakeReplica())
    pool = await fleet.pool(2)
    task = asyncio.ensure_future(collect(pool, requests(8)))
    await asyncio.sleep(0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtpctl.rollout.routing.ABORT_INTERVAL_S", 0.02)
        await pool.membership.leave(0)
    assert_all_once(await task, 8)


@in_loop
async def test_responses_of_a_hanging_leaver_continue_elsewhere() -> None:
    class Hanging(FakeReplica):
        async def pause(self, mode: PauseMode) -> None:
            await asyncio.Event().wait()

        async def shutdown(self) -> None:
            await super().shutdown()
            self.die()

    fleet = Fleet(lambda index: Hanging(tick_s=0.01) if index == 0 else FakeReplica())
    pool = await fleet.pool(2)
    task = asyncio.ensure_future(collect(pool, requests(16)))
    await asyncio.sleep(0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtpctl.rollout.routing.HAND_OVER_S", 0.05)
        await pool.membership.leave(0)
    assert_all_once(await task, 16)
    assert pool.membership.occupied_slots == [1]


@in_loop
async def test_replica_that_dies_while_leaving_is_not_restarted() -> None:
    class Dying(FakeReplica):
        async def pause(self, mode: PauseMode) -> None:
            self.die()
            raise EngineDead("killed")

    fleet = Fleet(lambda index: Dying() if index == 1 else FakeReplica())
    pool = await fleet.pool(2, max_restarts=0)
    task = asyncio.ensure_future(collect(pool, requests(16)))
    await asyncio.sleep(0.005)
    await pool.membership.leave(1)
    assert_all_once(await task, 16)
    assert len(fleet.replicas_by_slot[1]) == 1 and pool.membership.occupied_slots == [0]


@in_loop
async def test_joining_replica_has_the_served_version_before_it_answers() -> None:
    fleet = Fleet()
    pool = await fleet.pool(1)
    await pool.update(MANIFESTS[3])
    task = asyncio.ensure_future(collect(pool, requests(60)))
    pool.membership.join(1)
    await asyncio.sleep(0.05)
    assert pool.membership.num_serving == 1, "the version is nowhere yet"
    fleet.published.there = [MANIFESTS[2], MANIFESTS[3], MANIFESTS[4]]
    await until_serving(pool.membership, 2)
    more = [*await task, *await collect(pool, requests(40))]
    assert fleet.replicas_by_slot[1][0].served, "it got its share"
    assert {span.version for sample in more for span in sample.version_spans} == {3}


@in_loop
async def test_capacity_follows_those_that_serve() -> None:
    fleet = Fleet(lambda index: FakeReplica(tick_s=0.002))
    pool = await fleet.pool(1, max_in_flight=4)
    taken = 0

    async def stream() -> Any:
        nonlocal taken
        for request in requests(400, max_tokens=40):
            taken += 1
            yield request

    async def drain() -> None:
        async for _ in pool.generate(stream()):
            pass

    task = asyncio.ensure_future(drain())
    await asyncio.sleep(0.02)
    assert taken == 4
    pool.membership.join(1)
    await until_serving(pool.membership, 2)
    await asyncio.sleep(0.02)
    assert fleet.live[1].in_flight == 4
    task.cancel()


@in_loop
async def test_update_and_leave_exclude_each_other() -> None:
    """One that was named for an update takes part in it; the next one names it no more."""
    fleet = Fleet()
    pool = await fleet.pool(2)
    async with pool.quiesce():
        assert pool.rank_names(1) == ["rollout 0.0.0", "rollout 1.0.0"]
        leaving = asyncio.ensure_future(pool.membership.leave(1))
        await asyncio.sleep(0.01)
        reports = await pool.apply_update(MANIFESTS[1])
        assert [report.version for report in reports] == [1, 1] and not leaving.done()
    await leaving
    async with pool.quiesce():
        assert pool.rank_names(1) == ["rollout 0.0.0"]
    fleet.published.there = [MANIFESTS[1]]
    pool.membership.join(1)
    await until_serving(pool.membership, 2)
    async with pool.quiesce():
        assert pool.rank_names(1) == ["rollout 0.0.0", "rollout 1.1.0"], "no name is used twice"


@in_loop
async def test_replica_waiting_to_leave_gets_no_request_and_is_not_restarted() -> None:
    fleet = Fleet()
    pool = await fleet.pool(3)
    async with pool.quiesce():
        leaving = [asyncio.ensure_future(pool.membership.leave(index)) for index in (0, 1)]
        await asyncio.sleep(0)
        assert_all_once(await collect(pool, requests(20)), 20)
        fleet.live[0].die()
        await pool.control_speculation()  # notices it
        await asyncio.sleep(0.01)
    await asyncio.gather(*leaving)
    assert [len(replica.served) for replica in fleet.live] == [0, 0, 20]
    assert [len(each) for each in fleet.replicas_by_slot.values()] == [1, 1, 1] and all(replica.closed for replica in fleet.live[:2])


@in_loop
async def test_requests_wait_for_a_replica_if_none_serves() -> None:
    fleet = Fleet()
    pool = await fleet.pool(1)
    task = asyncio.ensure_future(collect(pool, requests(8)))
    await asyncio.sleep(0.005)
    await pool.membership.leave(0)
    await asyncio.sleep(0.02)
    assert not task.done() and pool.membership.occupied_slots == []
    pool.membership.join(0)
    assert_all_once(await task, 8)


@in_loop
async def test_slots_to_vacate_are_ordered_by_use() -> None:
    fleet = Fleet()
    pool = await fleet.pool(3, max_restarts=0)
    fleet.live[1].die()
    await pool.control_speculation()  # notices it
    fleet.replicas_by_slot[1][-1].die()
    while (await pool.health())[1].reason.startswith("restarting"):
        await asyncio.sleep(0.002)
    assert pool.membership.occupied_slots == [1, 2, 0]


@in_loop
async def test_random_joins_leaves_deaths_and_updates_lose_no_sample() -> None:
    """Versions change all the while; every token is under a version that its replica had."""
    for seed in range(5):
        dice = random.Random(seed)
        fleet = Fleet()
        pool = await fleet.pool(2, max_restarts=1000)
        task = asyncio.ensure_future(collect(pool, requests(150, max_tokens=30)))
        version = 0
        while not task.done():
            await asyncio.sleep(dice.uniform(0, 0.01))
            match dice.randrange(4):
                case 0:
                    version += 1
                    await pool.update(MANIFESTS[version], mode=dice.choice(("keep", "abort", "wait")))
                    fleet.published.there.append(MANIFESTS[version])
                case 1 if len(pool.membership.occupied_slots) > 1:
                    await pool.membership.leave(dice.choice(pool.membership.occupied_slots))
                case 2 if len(pool.membership.occupied_slots) < 4:
                    pool.membership.join(next(index for index in range(4) if index not in pool.membership.occupied_slots))
                case 3:
                    dice.choice(fleet.live).die()
        samples = await task
        assert_all_once(samples, 150, tokens=30)
        for sample in samples:
            versions = [span.version for span in sample.version_spans]
            assert versions == sorted(versions) and versions[-1] <= version
        await pool.close()
