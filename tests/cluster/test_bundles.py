"""Actors run on the planned hosts, on a simulated cluster of three hosts whose GPUs are only declared to Ray."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mtpctl.cluster.bundles import (
    ActorBundle,
    ActorLocation,
    Bundles,
    Claim,
    get_current_location,
    list_draining_nodes,
    list_live_nodes,
    list_ray_hosts,
)
from mtpctl.controller.services import reserve_bundles
from mtpctl.controller.status import Waits
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
    """A head without GPUs, and two hosts of two GPUs each."""
    import ray
    from ray.cluster_utils import Cluster

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors need not import this file
    with pytest.MonkeyPatch.context() as patch:
        # Ray rejects a host with more GPUs than the variable names.
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        for _ in range(2):
            cluster.add_node(num_cpus=8, num_gpus=2, wait=False)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR", runtime_env={"env_vars": {}})
        yield cluster
        ray.shutdown()
        cluster.shutdown()


class Probe:
    """An actor that reports its location."""

    def location(self) -> ActorLocation:
        return get_current_location()


async def reserve(recipe: Recipe, lines: list[str], stopping: asyncio.Event | None = None) -> tuple[Placement, Bundles] | None:
    return await reserve_bundles(recipe, Waits(lambda messages: lines.extend(messages), Path()), stopping or asyncio.Event())


def start_in(bundle: ActorBundle, **options: Any) -> Any:
    import ray

    return ray.remote(Probe).options(**{**bundle.options(), **options}).remote()


def test_actors_run_on_the_hosts_and_gpus_of_the_plan(hosts: Any) -> None:
    """Each tensor-parallel group is on one host, and each engine shares the GPU of a rank. A second run waits for capacity."""
    import ray
    from ray.util.placement_group import remove_placement_group

    async def main() -> None:
        lines: list[str] = []
        reserved = await reserve(recipe_of(), lines)
        assert reserved is not None
        placement, bundles = reserved
        ranks = [placement.of("trainer")[i].host for i in range(4)]
        assert ranks[0] == ranks[1] != ranks[2] == ranks[3]
        assert set(bundles.by_actor) == {"trainer-0", "trainer-1", "trainer-2", "trainer-3", "rollout-0", "rollout-1"}
        actors = {name: start_in(bundle) for name, bundle in bundles.by_actor.items()}
        for name, actor in actors.items():
            bundles.check(name, await actor.location.remote())
        assert bundles.locations["rollout-0"] == bundles.locations["trainer-0"], "they share a GPU"
        assert bundles.locations["trainer-0"].gpu_ids != bundles.locations["trainer-1"].gpu_ids

        # The cluster is full: a second run waits until capacity is released.
        waiting = asyncio.create_task(reserve(recipe_of("train.parallel.dp=1", "rollout.replicas=1"), lines))
        await asyncio.sleep(1.5)
        assert not waiting.done()
        for name in ("trainer-2", "trainer-3", "rollout-1"):
            ray.kill(actors.pop(name))
        for group in {bundles.by_actor[name].group for name in ("trainer-2", "trainer-3")}:
            remove_placement_group(group)
        second = await asyncio.wait_for(waiting, 30)
        assert second is not None and second[1].by_actor["trainer-0"].node_id == bundles.by_actor["trainer-2"].node_id
        for group in {bundle.group for bundle in second[1].by_actor.values()} | {
            bundles.by_actor["trainer-0"].group,
            bundles.by_actor["trainer-1"].group,
        }:
            remove_placement_group(group)

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_stop_ends_the_wait_and_a_run_that_never_fits_is_an_error(hosts: Any) -> None:
    async def main() -> None:
        began, stopping = time.monotonic(), asyncio.Event()
        with pytest.raises(ClusterResources, match="8 GPUs are needed"):
            await reserve(recipe_of("train.gpus=1", "train.parallel.dp=3", "rollout.gpus=1"), [])
        assert time.monotonic() - began > 1, "hosts may still join"
        stopping.set()
        assert await reserve(recipe_of("train.gpus=1", "train.parallel.dp=3", "rollout.gpus=1"), [], stopping) is None

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_joined_host_offers_bundles_until_it_is_drained(hosts: Any) -> None:
    """A released bundle can be reserved by others. No bundle is reserved on a host that is drained or removed."""
    import ray
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]

    async def main() -> None:
        bundles, claim = Bundles(), Claim("rollout-7", 16, 2)
        assert await bundles.add(claim) is None, "no host is so large"
        large = hosts.add_node(num_cpus=16, num_gpus=3)
        hosts.wait_for_nodes()
        bundle = await bundles.add(claim)
        assert bundle is not None and bundle.node_id == large.node_id and not bundle.planned
        actor = start_in(bundle)
        bundles.check("rollout-7", await actor.location.remote())
        assert await bundles.add(claim) is bundle, "an existing bundle is reused"
        other = Claim("rollout-8", 16)
        assert await bundles.add(other) is None, "it is full"
        ray.kill(actor)
        bundles.release("rollout-7")
        assert not bundles.by_actor and not bundles.locations
        async with asyncio.timeout(30):
            while await bundles.add(other) is None:
                await asyncio.sleep(0.2)
        bundles.release("rollout-8")

        client = GcsClient(address=hosts.address)
        accepted, why = client.drain_node(large.node_id, DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"), "test", 0)
        assert accepted, why
        async with asyncio.timeout(30):
            while large.node_id in list_live_nodes() - list_draining_nodes():
                await asyncio.sleep(0.1)
        assert await bundles.add(claim) is None
        hosts.remove_node(large)

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_host_counts_as_lost_as_soon_as_its_raylet_is_killed(hosts: Any) -> None:
    """Ray itself considers it alive for some more seconds."""
    joined = hosts.add_node(num_cpus=1)
    hosts.wait_for_nodes()
    bundles = Bundles({"rollout-9": ActorBundle(Claim("rollout-9", 1), joined.node_id, None)})
    assert bundles.on_lost_hosts(["rollout-9"]) == []
    joined.kill_raylet()
    assert bundles.on_lost_hosts(["rollout-9"]) == ["rollout-9"]
    assert joined.node_id not in {host.node_id for host in list_ray_hosts()}
    hosts.remove_node(joined)


def test_host_names_are_unique(hosts: Any) -> None:
    assert len({host.name for host in list_ray_hosts()}) == 3
    assert [host.total.gpus for host in list_ray_hosts()] == [0, 2, 2], "the head comes first"


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Bundles:
    """Two ranks and an engine on a host; the engine shares the second rank's GPU."""
    monkeypatch.setattr("mtpctl.cluster.bundles.list_ray_hosts", lambda: [])
    first, second = object(), object()
    of = {"trainer-0": first, "trainer-1": second, "rollout-0": second}
    return Bundles({name: ActorBundle(Claim(name, 1, 0.5), "aaaaaaaa", group) for name, group in of.items()})  # type: ignore[arg-type]


def test_an_actor_on_another_host_than_planned_is_an_error(plan: Bundles) -> None:
    with pytest.raises(RuntimeFailure, match=r"trainer-0: runs on host bbbbbb, but the plan assigns it to aaaaaa"):
        plan.check("trainer-0", ActorLocation("bbbbbbbb", ("0",)))


def test_gpus_shared_against_the_plan_are_an_error(plan: Bundles) -> None:
    plan.check("trainer-0", ActorLocation("aaaaaaaa", ("3",)))
    with pytest.raises(RuntimeFailure, match=r"trainer-1: has GPU 3 of host aaaaaa, which the plan assigns to trainer-0"):
        plan.check("trainer-1", ActorLocation("aaaaaaaa", ("3",)))
    plan.locations.pop("trainer-1")
    plan.check("trainer-1", ActorLocation("aaaaaaaa", ("0",)))
    with pytest.raises(RuntimeFailure, match=r"rollout-0: has GPU 2 of host aaaaaa, but the plan shares a GPU with trainer-1"):
        plan.check("rollout-0", ActorLocation("aaaaaaaa", ("2",)))


def test_compact_moves_bundles_on_live_hosts_to_the_first_actors(plan: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpctl.cluster.bundles.list_live_nodes", lambda: {"cc"})
    bundles = Bundles(
        {f"trainer-{i}": ActorBundle(Claim(f"trainer-{i}", 1), node, None) for i, node in enumerate(["bb", "bb", "cc", "cc"])}
    )
    assert bundles.on_lost_hosts(list(bundles.by_actor)) == ["trainer-0", "trainer-1"]
    bundles.locations["trainer-2"] = ActorLocation("cc", ("0",))
    bundles.compact(list(bundles.by_actor))
    assert not bundles.locations, "trainer-0 may get the GPU that trainer-2 had"
    assert [(bundle.claim.actor, bundle.node_id) for bundle in bundles.by_actor.values()] == [
        ("trainer-0", "cc"),
        ("trainer-1", "cc"),
        ("trainer-2", "bb"),
        ("trainer-3", "bb"),
    ]


def test_actors_are_listed_as_awaited_until_the_wait_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ElasticRollout` leaves free capacity to the actors that wait."""
    monkeypatch.setattr("mtpctl.cluster.bundles.list_live_nodes", set)
    monkeypatch.setattr("mtpctl.cluster.bundles.list_ray_hosts", list)
    bundles = Bundles({"logprob-0-rank-0": ActorBundle(Claim("logprob-0-rank-0", 1), "bb", None)})

    async def wait() -> None:
        waiting = asyncio.create_task(bundles.acquire("logprob-0-rank-0"))
        await asyncio.sleep(0)
        assert list(bundles.awaited) == ["logprob-0-rank-0"]
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not bundles.awaited

    asyncio.run(wait())
