"""The number of replicas follows requests and available hosts, with fake engines and hosts that join and leave."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from mtpctl.cluster.bundles import ActorBundle, Bundles, Claim
from mtpctl.controller.elastic import YIELD_S, ElasticRollout
from mtpctl.controller.state import RunState
from mtpctl.controller.status import Waits
from mtpctl.recipe.rollout import ReplicaRange, VllmConfig
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.telemetry.run_directory import RunDirectory, request_replicas
from tests.fakes.fleet import Fleet, assert_all_once, collect, requests
from tests.fakes.replica import FakeReplica


@dataclass
class Hosts:
    """Hosts with room for a number of engines each, in place of Ray's. `drained` hosts are to be removed."""

    room: dict[str, int]
    drained: set[str] = field(default_factory=set)
    by_actor: dict[str, ActorBundle] = field(default_factory=dict)
    awaited: dict[str, float] = field(default_factory=dict)

    def taken(self, host: str) -> int:
        return sum(bundle.node_id == host for bundle in self.by_actor.values())

    async def add(self, claim: Claim) -> ActorBundle | None:
        await asyncio.sleep(0)
        for host, room in self.room.items():
            if host not in self.drained and self.taken(host) < room:
                self.by_actor[claim.actor] = bundle = ActorBundle(claim, host, None)
                return bundle
        return None

    def lose_host_of(self, actor: str, since: float) -> None:
        self.by_actor[actor], self.awaited[actor] = ActorBundle(Claim(actor, 1.0), "lost", None), since

    def release(self, actor: str) -> None:
        self.by_actor.pop(actor, None)

    def host(self, actor: str) -> str:
        return self.by_actor[actor].node_id


@dataclass
class World:
    """A run of fake engines with its hosts. `said`: its events; `shown`: the last wait that the run displayed."""

    hosts: Hosts
    run: RunDirectory
    fleet: Fleet
    pool: ReplicaPool
    elastic: ElasticRollout
    state: RunState
    waits: Waits
    said: list[str] = field(default_factory=list)

    async def until(self, met: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not met():
                await asyncio.sleep(0.005)

    async def settled(self, *taken: int) -> None:
        """Wait until exactly these slots have replicas that serve, and for some polls longer."""
        for _ in range(3):
            await self.until(
                lambda: sorted(self.pool.membership.occupied_slots) == [*taken] and self.pool.membership.num_serving == len(taken)
            )
            await asyncio.sleep(0.02)

    async def settled_on(self, hosts: str) -> None:
        """Until replicas serve on exactly these hosts, whatever their slots, and for some looks more."""
        for _ in range(3):
            await self.until(lambda: "".join(sorted(bundle.node_id for bundle in self.hosts.by_actor.values())) == hosts)
            await self.until(lambda: self.pool.membership.num_serving == len(self.pool.membership.occupied_slots) == len(hosts))
            await asyncio.sleep(0.02)


@asynccontextmanager
async def world(path: Path, room: dict[str, int], *, least: int = 1, most: int = 4, **options: Any) -> AsyncIterator[World]:
    """A run that was planned with the `least` replicas on its first hosts. With the `path` of another one it is that run started again."""
    hosts = Hosts(room)
    for index in range(least):
        assert await hosts.add(Claim(f"rollout-{index}", 1.0)) is not None
    with pytest.MonkeyPatch.context() as patch, RunDirectory.create(path / "run", "name: t\n") as run:
        patch.setattr("mtpctl.controller.elastic.POLL_S", 0.005)
        patch.setattr("mtpctl.controller.elastic.list_live_nodes", lambda: set(hosts.room))
        patch.setattr("mtpctl.controller.elastic.list_draining_nodes", lambda: set(hosts.drained))
        fleet = Fleet(lambda index: FakeReplica(tick_s=0.001))
        pool = await fleet.pool(least, **options)
        said: list[str] = []
        state, waits = (
            cast(RunState, type("State", (), {"weights_lost": False, "stop_requested": asyncio.Event()})()),
            Waits(lambda lines: None, run.logs),
        )
        rollout = VllmConfig(replicas=ReplicaRange(min=least, max=most))
        elastic = ElasticRollout(rollout, run, cast(Bundles, hosts), state, waits, said.append)
        async with elastic.watch(), elastic.scale(pool.membership, Claim("rollout-0", 1.0)):
            yield World(hosts, run, fleet, pool, elastic, state, waits, said)
        await pool.close()


def in_loop(test: Callable[[Path], Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
    """Runs an asynchronous test, with a deadline."""

    def run(tmp_path: Path) -> None:
        asyncio.run(asyncio.wait_for(test(tmp_path), 90))

    run.__doc__, run.__name__ = test.__doc__, test.__name__
    return run


@in_loop
async def test_slow_host_reports_do_not_block_the_loop(tmp_path: Path) -> None:
    never = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        async with world(tmp_path, {"a": 1}) as it:
            await it.settled_on("a")
            looking = threading.Event()
            patch.setattr("mtpctl.controller.elastic.list_live_nodes", lambda: looking.set() or (never.wait() and set()))
            await it.until(looking.is_set)
            await collect(it.pool, requests(20, max_tokens=10))
    never.set()


@in_loop
async def test_replicas_join_and_leave_with_hosts_up_to_the_maximum(tmp_path: Path) -> None:
    async with world(tmp_path, {"a": 1}) as it:
        task = asyncio.ensure_future(collect(it.pool, requests(250, max_tokens=40)))
        await it.settled_on("a")
        it.hosts.room["b"] = 2
        await it.settled_on("abb")
        it.hosts.room["c"] = 8
        await it.settled_on("abbc")
        it.hosts.drained.add("b")
        await it.settled_on("accc")
        del it.hosts.room["b"], it.hosts.room["c"]
        await it.settled_on("a")
        assert_all_once(await task, 250, tokens=40)
        assert it.pool.membership.num_restarts == 0
        assert it.said[:3] == ["replica 1 joins, on host b", "replica 2 joins, on host b", "replica 1 serves"]
        assert "replica 1 leaves: its host is being drained" in it.said and "replica 3 leaves: its host is lost" in it.said


@in_loop
async def test_replica_lost_with_its_host_is_replaced_on_another_any_number_of_times(tmp_path: Path) -> None:
    """Nothing counts against `rollout.max_restarts`, since nothing is wrong with the replica."""
    async with world(tmp_path, {"a": 1, "b": 1}, most=2, max_restarts=0) as it:
        await it.settled_on("ab")
        for before, after in ("bc", "cd", "de"):
            (actor,) = [actor for actor, bundle in it.hosts.by_actor.items() if bundle.node_id == before]
            it.hosts.room[after] = it.hosts.room.pop(before)
            it.fleet.replicas_by_slot[int(actor.removeprefix("rollout-"))][-1].die()
            await it.pool.control_speculation()  # notices it
            await it.settled_on(f"a{after}")


@in_loop
async def test_requested_number_is_reached_and_answered(tmp_path: Path) -> None:
    async with world(tmp_path, {"a": 8}) as it:
        await it.settled(0, 1, 2, 3)
        answer = await asyncio.to_thread(request_replicas, it.run, 2)
        assert (answer.message, answer.refused) == ("2 replica(s) are requested, and 4 serve", False)
        await it.settled(0, 1)
        assert set(it.hosts.by_actor) == {"rollout-0", "rollout-1"}, "the places of the others are free"
        await asyncio.to_thread(request_replicas, it.run, 3)
        await it.settled(0, 1, 2)
        refused = await asyncio.to_thread(request_replicas, it.run, 5)
        assert (refused.message, refused.refused) == ("--replicas: 5 is not within rollout.replicas: min 1, max 4", True)
        await it.settled(0, 1, 2)


@in_loop
async def test_request_during_the_start_is_answered(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "run", "name: t\n").close()
    requests_folder = tmp_path / "run" / "requests"
    requests_folder.mkdir()
    (requests_folder / "1.json").write_text('{"replicas": 2}')
    async with world(tmp_path, {"a": 8}) as it:
        await it.settled(0, 1)
        assert json.loads((requests_folder / "1.answer").read_text())["message"] == "2 replica(s) are requested, and 1 serve"


@in_loop
async def test_requested_number_survives_a_resume(tmp_path: Path) -> None:
    async with world(tmp_path, {"a": 8}) as it:
        await asyncio.to_thread(request_replicas, it.run, 2)
        await it.settled(0, 1)
    async with world(tmp_path, {"a": 8}) as it:
        await it.settled(0, 1)
        assert it.said[0] == "2 replica(s) are requested, by an earlier mtpctl scale"
        await asyncio.to_thread(request_replicas, it.run, 4)
        await it.settled(0, 1, 2, 3)
    async with world(tmp_path, {"a": 8}, most=3) as it:
        await it.settled(0, 1, 2)
        assert it.said[0] == "4 replica(s) are requested, by an earlier mtpctl scale, but rollout.replicas allows 3"
    async with world(tmp_path, {"a": 8}, most=5) as it:
        await it.settled(0, 1, 2, 3)


@in_loop
async def test_number_that_cannot_be_saved_is_rejected(tmp_path: Path) -> None:
    """As on a full disk."""
    async with world(tmp_path, {"a": 8}, most=2) as it:
        await it.settled(0, 1)
        it.run.requested_replicas.mkdir()
        refused = await asyncio.to_thread(request_replicas, it.run, 1)
        assert (refused.message, refused.refused) == (
            f"RUN: cannot write {it.run.requested_replicas} (Is a directory); free space and retry",
            True,
        )
        await it.settled(0, 1)
        it.run.requested_replicas.rmdir()
        await asyncio.to_thread(request_replicas, it.run, 1)
        await it.settled(0)


@in_loop
async def test_request_takes_effect_even_if_its_answer_cannot_be_written(tmp_path: Path) -> None:
    async with world(tmp_path, {"a": 8}, most=2) as it:
        await it.settled(0, 1)
        (it.run.requests / "1.answer").mkdir(parents=True)
        (it.run.requests / "1.json").write_text('{"replicas": 1}')
        await it.settled(0)
        assert "mtpctl scale gets no answer (Is a directory): 1 replica(s) are requested, and 2 serve" in it.said


@in_loop
async def test_quarantined_replicas_leave_first(tmp_path: Path) -> None:
    async with world(tmp_path, {"a": 8}, least=2, most=2, max_restarts=0) as it:
        it.fleet.live[0].die()
        await it.pool.control_speculation()  # notices it
        await it.until(lambda: it.pool.membership.occupied_slots == [0, 1])
        it.elastic.rollout = VllmConfig(replicas=ReplicaRange(min=1, max=2))
        await asyncio.to_thread(request_replicas, it.run, 1)
        await it.settled(1)
        await asyncio.to_thread(request_replicas, it.run, 2)
        await it.settled(0, 1)


@in_loop
async def test_run_without_room_for_the_minimum_shows_its_wait(tmp_path: Path) -> None:
    async with world(tmp_path, {"a": 1, "b": 1}, least=2, most=2) as it:
        waited = 0

        def on_wait() -> None:
            nonlocal waited
            waited += 1

        it.elastic.on_wait = on_wait
        await it.settled(0, 1)
        assert waited == 0 and not it.waits._waits
        room = it.hosts.room
        room.clear()
        task = asyncio.ensure_future(collect(it.pool, requests(20)))
        await it.until(lambda: bool(it.waits._waits) and waited > 2)
        assert it.waits._waits[0].reason == "rollout: 0 of at least 2 replica(s) have a host (rollout.replicas.min), waiting for capacity"
        assert not task.done()
        room["c"] = 2
        await it.settled(0, 1)
        assert_all_once(await task, 20)
        assert not it.waits._waits


@in_loop
async def test_no_replica_joins_while_the_trainer_is_lost(tmp_path: Path) -> None:
    async with world(tmp_path, {"a": 1}) as it:
        it.state.weights_lost = True
        it.hosts.room["b"] = 1
        await asyncio.sleep(0.05)
        await it.settled(0)
        it.state.weights_lost = False
        await it.settled(0, 1)


@in_loop
async def test_waiting_actor_gets_the_bundle_of_a_replica_above_the_minimum(tmp_path: Path) -> None:
    """The host of a log-prob replica is lost, and rollout has filled all others before the loss was noticed."""
    async with world(tmp_path, {"a": 1, "b": 1, "c": 1}, most=3) as it:
        await it.settled(0, 1, 2)
        it.hosts.lose_host_of("logprob-0", time.monotonic())
        it.hosts.awaited["rollout-1"] = time.monotonic() - YIELD_S
        await it.settled(0, 1, 2)
        assert not any("leaves" in line for line in it.said), "another host may join"
        it.hosts.awaited["logprob-0"] -= YIELD_S
        await it.until(lambda: "rollout-2" not in it.hosts.by_actor)
        assert "replica 2 leaves: no other host has capacity for logprob-0" in it.said
        it.hosts.by_actor["logprob-0"] = ActorBundle(Claim("logprob-0", 1.0), "c", None)
        del it.hosts.awaited["logprob-0"]
        await it.settled(0, 1)
        it.hosts.room["d"] = 1
        it.hosts.lose_host_of("trainer-0", time.monotonic())
        await asyncio.sleep(0.05)
        await it.settled(0, 1)
        del it.hosts.awaited["trainer-0"]
        await it.settled(0, 1, 2)


@in_loop
async def test_minimum_of_replicas_stays_while_actors_wait(tmp_path: Path) -> None:
    async with world(tmp_path, {"a": 2}, least=2, most=3) as it:
        it.hosts.lose_host_of("trainer-0", time.monotonic() - YIELD_S)
        await asyncio.sleep(0.1)
        await it.settled(0, 1)


@in_loop
async def test_draining_and_surplus_replicas_are_counted_once(tmp_path: Path) -> None:
    """One replica leaves with its host, and the requested number is one less: no other leaves."""
    async with world(tmp_path, {"a": 1, "b": 1, "c": 1}, most=3) as it:
        await it.settled(0, 1, 2)
        it.hosts.drained.add("c")
        it.elastic.requested_replicas = 2
        await it.settled(0, 1)
        assert sum("leaves" in line for line in it.said) == 1


@in_loop
async def test_error_of_the_run_is_not_replaced_by_one_of_scaling(tmp_path: Path) -> None:
    for failure in (KeyError("the run"), None):
        with pytest.raises(KeyError if failure else ValueError):
            async with world(tmp_path / str(failure), {"a": 1}) as it:
                await it.settled(0)
                it.elastic._reconcile = lambda *_: int("scaling")  # type: ignore[method-assign, assignment, return-value]
                await it.until(lambda: any("can no longer join" in line for line in it.said))
                if failure:
                    raise failure


@in_loop
async def test_leaving_replicas_end_with_the_run(tmp_path: Path) -> None:
    async with world(tmp_path, {"a": 2}, most=2) as it:
        await it.settled(0, 1)
        holding = asyncio.Event()

        async def hold(mode: str) -> None:
            await holding.wait()

        it.fleet.live[1].pause = hold  # type: ignore[method-assign]
        task = asyncio.ensure_future(collect(it.pool, requests(40, max_tokens=500)))
        await it.until(lambda: it.fleet.live[1].in_flight > 0)
        await asyncio.to_thread(request_replicas, it.run, 1)
        await it.until(lambda: "replica 1 leaves: 1 are requested" in it.said)
        task.cancel()
    assert all(replica.closed for replica in it.fleet.live)
