"""Actors sit where the plan has them: on three hosts, which are processes of this machine, with cards that only Ray believes in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mtpctl.cluster.bundles import Claim, Found, Seat, Seats, draining, here, living, ray_hosts
from mtpctl.controller.seating import seated
from mtpctl.controller.waits import Waits
from mtpctl.errors import ClusterResources, RuntimeFailure
from mtpctl.plan.placement import Placement
from mtpctl.recipe.loading import load_recipe
from mtpctl.recipe.schema import Recipe

LAYOUT = (
    "train.parallel.tp=2",
    "train.parallel.dp=2",
    "train.gpus=0.6",
    "rollout.tp=1",
    "rollout.replicas=2",
    "rollout.gpus=0.4",
    "logprob.standalone=false",
    "sync.transport=ipc",
)


def recipe_of(*sets: str) -> Recipe:
    return load_recipe("mimo7b_mtp", sets=[*LAYOUT, "cluster.address=here:1", "cluster.actor_deadline_s=1", *sets]).recipe


@pytest.fixture(scope="module")
def hosts() -> Iterator[Any]:
    """A head without cards, and two hosts of two cards each."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=8, num_gpus=2, wait=False)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR", runtime_env={"env_vars": {}})
    yield cluster
    ray.shutdown()
    cluster.shutdown()


class Sitter:
    """An actor that says where it is."""

    def here(self) -> Found:
        return here()


async def take_places(recipe: Recipe, told: list[str], stopping: asyncio.Event | None = None) -> tuple[Placement, Seats] | None:
    from pathlib import Path

    return await seated(recipe, Waits(lambda lines: told.extend(lines), Path()), stopping or asyncio.Event())


def sit(seat: Seat, **options: Any) -> Any:
    import ray

    return ray.remote(Sitter).options(**{**seat.options(), **options}).remote()


def test_actors_have_the_hosts_and_the_cards_of_the_plan(hosts: Any) -> None:
    """A tensor-parallel group on one host although another run has a card there, and each engine on the card of a rank."""
    import ray
    from ray.util.placement_group import remove_placement_group

    async def main() -> None:
        told: list[str] = []
        found = await take_places(recipe_of(), told)
        assert found is not None
        placement, seats = found
        ranks = [placement.of("trainer")[i].host for i in range(4)]
        assert ranks[0] == ranks[1] != ranks[2] == ranks[3]
        assert set(seats.seats) == {"trainer-0", "trainer-1", "trainer-2", "trainer-3", "rollout-0", "rollout-1"}
        actors = {name: sit(seat) for name, seat in seats.seats.items()}
        for name, actor in actors.items():
            seats.check(name, await actor.here.remote())
        assert seats.found["rollout-0"] == seats.found["trainer-0"], "they share a card"
        assert seats.found["trainer-0"].cards != seats.found["trainer-1"].cards

        # The cluster is full now: another run waits for a place, and goes on once there is one.
        waiting = asyncio.create_task(take_places(recipe_of("train.parallel.dp=1", "rollout.replicas=1"), told))
        await asyncio.sleep(1.5)
        assert not waiting.done()
        for name in ("trainer-2", "trainer-3", "rollout-1"):
            ray.kill(actors.pop(name))
        for group in {seats.seats[name].group for name in ("trainer-2", "trainer-3")}:
            remove_placement_group(group)
        second = await asyncio.wait_for(waiting, 30)
        assert second is not None and second[1].seats["trainer-0"].node == seats.seats["trainer-2"].node
        for group in {seat.group for seat in second[1].seats.values()} | {seats.seats["trainer-0"].group, seats.seats["trainer-1"].group}:
            remove_placement_group(group)

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_stop_ends_the_wait_and_what_never_fits_is_told(hosts: Any) -> None:
    async def main() -> None:
        began, stopping = time.monotonic(), asyncio.Event()
        with pytest.raises(ClusterResources, match="8 GPUs are asked for"):
            await take_places(recipe_of("train.gpus=1", "train.parallel.dp=3", "rollout.gpus=1"), [])
        assert time.monotonic() - began > 1, "hosts may still join"
        stopping.set()
        assert await take_places(recipe_of("train.gpus=1", "train.parallel.dp=3", "rollout.gpus=1"), [], stopping) is None

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_host_that_joins_has_seats_beyond_the_plan_until_it_is_drained(hosts: Any) -> None:
    """A place that is given up is free for others, and none is on a host that Ray was told to drain, or that is gone."""
    import ray
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    async def main() -> None:
        seats, claim = Seats(), Claim("rollout-7", 16, 2)
        assert await seats.add(claim) is None, "no host is so large"
        large = hosts.add_node(num_cpus=16, num_gpus=3)
        hosts.wait_for_nodes()
        seat = await seats.add(claim)
        assert seat is not None and seat.node == large.node_id and not seat.planned
        actor = sit(seat)
        seats.check("rollout-7", await actor.here.remote())
        assert await seats.add(claim) is seat, "a seat that one has is kept"
        other = Claim("rollout-8", 16)
        assert await seats.add(other) is None, "it is full"
        ray.kill(actor)
        seats.give_up("rollout-7")
        assert not seats.seats and not seats.found
        async with asyncio.timeout(30):
            while await seats.add(other) is None:
                await asyncio.sleep(0.2)
        seats.give_up("rollout-8")

        client = GcsClient(address=hosts.address)
        accepted, why = client.drain_node(large.node_id, DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"), "test", 0)
        assert accepted, why
        async with asyncio.timeout(30):
            while large.node_id in living() - draining():
                await asyncio.sleep(0.1)
        assert await seats.add(claim) is None
        hosts.remove_node(large)

    asyncio.run(asyncio.wait_for(main(), 120))


def test_each_host_has_a_name_of_its_own(hosts: Any) -> None:
    assert len({host.name for host in ray_hosts()}) == 3
    assert [host.whole.gpus for host in ray_hosts()] == [0, 2, 2], "the head comes first"


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Seats:
    """Two ranks and an engine on a host; the engine shares the second rank's card."""
    monkeypatch.setattr("mtpctl.cluster.bundles.ray_hosts", lambda: [])
    first, second = object(), object()
    of = {"trainer-0": first, "trainer-1": second, "rollout-0": second}
    return Seats({name: Seat(Claim(name, 1, 0.5), "aaaaaaaa", group) for name, group in of.items()})  # type: ignore[arg-type]


def test_an_actor_elsewhere_is_told_by_its_name(plan: Seats) -> None:
    with pytest.raises(RuntimeFailure, match=r"trainer-0: is on host bbbbbb, and the plan has it on aaaaaa"):
        plan.check("trainer-0", Found("bbbbbbbb", ("0",)))


def test_cards_are_shared_by_those_that_the_plan_has_share_them_and_by_no_others(plan: Seats) -> None:
    plan.check("trainer-0", Found("aaaaaaaa", ("3",)))
    with pytest.raises(RuntimeFailure, match=r"trainer-1: has card 3 of host aaaaaa, which the plan gives to trainer-0"):
        plan.check("trainer-1", Found("aaaaaaaa", ("3",)))
    plan.found.pop("trainer-1")
    plan.check("trainer-1", Found("aaaaaaaa", ("0",)))
    with pytest.raises(RuntimeFailure, match=r"rollout-0: has card 2 of host aaaaaa, and the plan has it share that of trainer-1"):
        plan.check("rollout-0", Found("aaaaaaaa", ("2",)))


def test_seats_close_up_to_the_hosts_that_are_left(plan: Seats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpctl.cluster.bundles.living", lambda: {"cc"})
    seats = Seats({f"trainer-{i}": Seat(Claim(f"trainer-{i}", 1), node, None) for i, node in enumerate(["bb", "bb", "cc", "cc"])})
    assert seats.lost(list(seats.seats)) == ["trainer-0", "trainer-1"]
    seats.close_up(list(seats.seats))
    assert [(seat.claim.actor, seat.node) for seat in seats.seats.values()] == [
        ("trainer-0", "cc"),
        ("trainer-1", "cc"),
        ("trainer-2", "bb"),
        ("trainer-3", "bb"),
    ]


def test_who_waits_for_a_place_is_known_until_the_wait_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas that join leave the room to those who wait (`ElasticRollout`)."""
    monkeypatch.setattr("mtpctl.cluster.bundles.living", set)
    monkeypatch.setattr("mtpctl.cluster.bundles.ray_hosts", list)
    seats = Seats({"logprob-0-rank-0": Seat(Claim("logprob-0-rank-0", 1), "bb", None)})

    async def wait() -> None:
        waiting = asyncio.create_task(seats.take("logprob-0-rank-0"))
        await asyncio.sleep(0)
        assert list(seats.awaited) == ["logprob-0-rank-0"]
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not seats.awaited

    asyncio.run(wait())
