"""Reservations of CPUs and GPUs for the actors of a run, on the hosts of the Ray cluster.

Each reservation is a placement group of one bundle that is pinned to a host, so that Ray cannot choose another host. Actors that share a
GPU share a bundle, and therefore get the same GPU. A bundle outlives its actor: a replacement starts in the same bundle, and no other
actor can take it in between. If its host is lost, it is replaced by a bundle on another host as soon as one has capacity.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypedDict

from mtpctl.cluster.hosts import Host, allocate, list_capacities
from mtpctl.errors import RuntimeFailure

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

RESERVE_TIMEOUT_S = 20.0
"""Time limit for reserving capacity that Ray reported as free, in seconds. It takes milliseconds, unless another job was faster."""
POLL_S = 0.5
"""Polling interval while waiting for capacity, in seconds."""
CONNECT_TIMEOUT_S = 1.0
"""Time limit for a connection to a raylet, in seconds."""
NODE_LABEL = "ray.io/node-id"


@dataclass(frozen=True, slots=True)
class RayHost:
    """A host, identified by its Ray node id, with its total and its unreserved capacity (`free`).

    A host that is being drained has no free capacity, because Ray starts no actors on it.
    """

    node_id: str
    total: Host
    free: Host

    @property
    def name(self) -> str:
        """The host's address, followed by the start of its node id if several hosts have the same address."""
        return self.total.name


def list_ray_hosts() -> list[RayHost]:
    """The hosts that are alive: the head first, the others ordered by address."""
    from ray._private.state import available_resources_per_node

    free_resources, draining = available_resources_per_node(), list_draining_nodes()
    nodes = sorted(_alive_nodes(), key=_host_order)
    addresses = [str(node["NodeManagerAddress"]) for node in nodes]
    hosts = []
    for node, address in zip(nodes, addresses, strict=True):
        node_id = str(node["NodeID"])
        name = address if addresses.count(address) == 1 else f"{address}/{node_id[:6]}"
        hosts.append(
            RayHost(node_id, _host(node["Resources"], name), _host({} if node_id in draining else free_resources.get(node_id, {}), name))
        )
    return hosts


def list_draining_nodes() -> set[str]:
    """Node ids of the hosts that are being drained: they are alive, but will be removed soon."""
    from ray._private.state import state

    return set(state.get_draining_nodes())


def list_live_nodes() -> set[str]:
    """Node ids of the hosts that are alive."""
    return {str(node["NodeID"]) for node in _alive_nodes()}


def _alive_nodes() -> list[dict[str, Any]]:
    """The nodes that Ray considers alive, without those whose raylet refuses connections.

    Ray takes some seconds to notice a lost host. An actor that is restarted there before that fails a second time. A raylet that does not
    answer within `CONNECT_TIMEOUT_S` counts as alive, because its host may only be busy.
    """
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    with ThreadPoolExecutor(max(1, len(nodes))) as pool:
        return [node for node, is_refused in zip(nodes, pool.map(_refuses_connections, nodes), strict=True) if not is_refused]


def _refuses_connections(node: dict[str, Any]) -> bool:
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), CONNECT_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _host(resources: dict[str, Any], name: str) -> Host:
    return Host(float(resources.get("CPU", 0)), float(resources.get("GPU", 0)), name)


def _host_order(node: dict[str, Any]) -> tuple[bool, list[int], str]:
    address = str(node["NodeManagerAddress"])
    numbers = [int(part) for part in address.split(".")] if address.replace(".", "").isdigit() else []
    return "node:__internal_head__" not in node["Resources"], numbers, str(node["NodeID"])


class Options(TypedDict, total=False):
    """Ray's scheduling options of an actor."""

    num_cpus: float
    num_gpus: float
    scheduling_strategy: object


@dataclass(frozen=True, slots=True)
class Claim:
    """The CPUs and GPUs that an actor needs, with the actor's name."""

    actor: str
    cpus: float
    gpus: float = 0.0


@dataclass(frozen=True, slots=True)
class BundleSpec:
    """Claims to reserve together in one bundle, on the host `node_id`."""

    node_id: str
    claims: tuple[Claim, ...]


@dataclass(frozen=True, slots=True)
class ActorBundle:
    """The reservation of one actor.

    Attributes:
        group: the placement group, shared by actors that share a GPU; None for an actor without CPUs and GPUs.
        planned: whether the bundle is part of the run's placement plan. For other bundles Ray chooses the GPUs.
    """

    claim: Claim
    node_id: str
    group: PlacementGroup | None
    planned: bool = True

    def options(self) -> Options:
        """Ray's options that start the actor in this bundle."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

        strategy: object = (
            NodeAffinitySchedulingStrategy(self.node_id, soft=False)
            if self.group is None
            else PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=0)
        )
        return {"num_cpus": self.claim.cpus, "num_gpus": self.claim.gpus, "scheduling_strategy": strategy}


@dataclass(frozen=True, slots=True)
class ActorLocation:
    """The node id of an actor's host, and the ids of its GPUs there."""

    node_id: str
    gpu_ids: tuple[str, ...]


def get_current_location() -> ActorLocation:
    import ray

    context = ray.get_runtime_context()
    return ActorLocation(context.get_node_id(), tuple(context.get_accelerator_ids().get("GPU", ())))


class BundlesUnavailable(Exception):
    """Another job reserved the capacity first."""


@dataclass
class Bundles:
    """The bundles of all actors, by actor name.

    Attributes:
        locations: locations that running actors reported.
        awaited: actors that wait for a bundle on a live host, with the start of the wait (`time.monotonic`).
    """

    by_actor: dict[str, ActorBundle] = field(default_factory=dict)
    locations: dict[str, ActorLocation] = field(default_factory=dict)
    awaited: dict[str, float] = field(default_factory=dict)

    async def reserve(self, specs: Sequence[BundleSpec], *, planned: bool = True) -> None:
        """Reserve all bundles or none. Raises BundlesUnavailable if Ray has no capacity for one of them."""
        from ray.util.placement_group import placement_group

        groups: list[PlacementGroup | None] = []
        try:
            for spec in specs:
                cpus, gpus = sum(claim.cpus for claim in spec.claims), round(sum(claim.gpus for claim in spec.claims), 4)
                resources = {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}
                selector = [{NODE_LABEL: spec.node_id}]
                groups.append(placement_group([resources], strategy="PACK", bundle_label_selector=selector) if resources else None)
            # The waits are concurrent: until a bundle that does not fit is detected, the others take capacity from other jobs.
            successes = await asyncio.gather(*(asyncio.to_thread(group.wait, RESERVE_TIMEOUT_S) for group in groups if group is not None))
            if not all(successes):
                raise BundlesUnavailable
        except BaseException:
            _remove(groups)
            raise
        for spec, group in zip(specs, groups, strict=True):
            for claim in spec.claims:
                self.by_actor[claim.actor] = ActorBundle(claim, spec.node_id, group, planned)

    async def add(self, claim: Claim) -> ActorBundle | None:
        """Return the existing bundle of a joining actor, or reserve one. Returns None if no host has capacity."""
        bundle = self.by_actor.get(claim.actor)
        if bundle is not None and bundle.node_id in list_live_nodes() - list_draining_nodes():
            return bundle
        self.release(claim.actor)
        hosts = list_ray_hosts()
        allocation = allocate(list_capacities(host.free for host in hosts), 1, claim.cpus, claim.gpus)
        if allocation is None:
            return None
        try:
            await self.reserve([BundleSpec(hosts[allocation[0]].node_id, (claim,))], planned=False)
        except BundlesUnavailable:
            return None
        return self.by_actor[claim.actor]

    def release(self, actor: str) -> None:
        """Free the bundle of an actor that has left. If others share it, it stays reserved; on a live host, the actor can join it again."""
        self.locations.pop(actor, None)
        if (bundle := self.by_actor.get(actor)) is None:
            return
        is_shared = any(other.group is bundle.group for name, other in self.by_actor.items() if name != actor and other.group is not None)
        if is_shared and bundle.node_id in list_live_nodes():
            return
        if not is_shared:
            _remove([bundle.group])
        del self.by_actor[actor]

    def on_lost_hosts(self, actors: Sequence[str]) -> list[str]:
        """The actors whose host is lost."""
        live_node_ids = list_live_nodes()
        return [actor for actor in actors if self.by_actor[actor].node_id not in live_node_ids]

    def compact(self, actors: Sequence[str]) -> None:
        """Reassign the bundles of actors with equal claims, so that the first actors get the bundles whose hosts are alive."""
        live_node_ids = list_live_nodes()
        ordered_bundles = sorted((self.by_actor[actor] for actor in actors), key=lambda bundle: bundle.node_id not in live_node_ids)
        for actor, bundle in zip(actors, ordered_bundles, strict=True):
            self.by_actor[actor] = replace(bundle, claim=replace(bundle.claim, actor=actor))
            self.locations.pop(actor, None)  # of the bundle that it had before

    async def try_acquire(self, actors: Sequence[str], *, per_host: int) -> list[ActorBundle] | None:
        """Return the actors' bundles, or None if there is no capacity.

        Bundles on lost hosts are replaced in groups of `per_host`, each group on one host.
        """
        if lost_actors := self.on_lost_hosts(actors):
            hosts = list_ray_hosts()
            free_capacities = list_capacities(host.free for host in hosts)
            specs: list[BundleSpec] = []
            for first in range(0, len(lost_actors), per_host):
                claims = [self.by_actor[actor].claim for actor in lost_actors[first : first + per_host]]
                allocation = allocate(free_capacities, len(claims), claims[0].cpus, claims[0].gpus)
                if allocation is None:
                    return None
                specs += [BundleSpec(hosts[allocation[0]].node_id, (claim,)) for claim in claims]
            lost_groups = [self.by_actor[actor].group for actor in lost_actors]
            try:
                await self.reserve(specs, planned=False)
            except BundlesUnavailable:
                return None
            _remove(lost_groups)
        for actor in actors:
            self.locations.pop(actor, None)
        return [self.by_actor[actor] for actor in actors]

    async def acquire(self, *actors: str) -> list[ActorBundle]:
        """Return the bundles of these actors, all on one host. If that host is lost, wait until another one has capacity for all."""
        with self.mark_awaited(actors):
            while (bundles := await self.try_acquire(actors, per_host=len(actors))) is None:
                await asyncio.sleep(POLL_S)
        return bundles

    @contextmanager
    def mark_awaited(self, actors: Sequence[str]) -> Iterator[None]:
        """List these actors in `awaited` while the block runs."""
        self.awaited |= dict.fromkeys(actors, time.monotonic())
        try:
            yield
        finally:
            for actor in actors:
                del self.awaited[actor]

    def check(self, actor: str, location: ActorLocation) -> None:
        """Record the location of a started actor. Raises RuntimeFailure if its host or GPUs differ from the plan."""
        bundle, host = self.by_actor[actor], _host_name(location.node_id)
        if location.node_id != bundle.node_id:
            raise RuntimeFailure(f"{actor}: runs on host {host}, but the plan assigns it to {_host_name(bundle.node_id)}")
        self.locations[actor] = location
        for other_actor, other_location in self.locations.items():
            if other_actor == actor or other_location.node_id != location.node_id:
                continue
            if not (bundle.planned and self.by_actor[other_actor].planned):
                continue
            shared_gpus = sorted({*other_location.gpu_ids} & {*location.gpu_ids})
            same_group = bundle.group is not None and self.by_actor[other_actor].group is bundle.group
            if shared_gpus and not same_group:
                raise RuntimeFailure(f"{actor}: has GPU {shared_gpus[0]} of host {host}, which the plan assigns to {other_actor}")
            if same_group and location.gpu_ids and not shared_gpus:
                raise RuntimeFailure(f"{actor}: has GPU {location.gpu_ids[0]} of host {host}, but the plan shares a GPU with {other_actor}")

    def host(self, actor: str) -> str:
        """The name of an actor's host."""
        return _host_name(self.by_actor[actor].node_id)

    def summary(self) -> str:
        """The actors of each host, in one line."""
        actors_by_node_id: dict[str, list[str]] = {}
        for actor, bundle in self.by_actor.items():
            actors_by_node_id.setdefault(bundle.node_id, []).append(actor)
        return "; ".join(f"{_host_name(node_id)}: {', '.join(actors)}" for node_id, actors in actors_by_node_id.items())


def _remove(groups: Sequence[PlacementGroup | None]) -> None:
    from ray.util.placement_group import remove_placement_group

    for group in groups:
        if group is not None:
            remove_placement_group(group)


def _host_name(node_id: str) -> str:
    return next((host.name for host in list_ray_hosts() if host.node_id == node_id), node_id[:6])
