"""Where the actors of a run sit: reserved places on hosts of the Ray cluster, each for one actor and for those that replace it.

A place lies in a placement group of one bundle that is bound to a host, so that Ray has no choice of the host. Actors that share a card are
in the same bundle, and so get the same card. A place outlives its actor: the actor's replacement starts there, and nobody else takes the
place meanwhile. Where the host of a place is gone, a place on another host takes over, once there is room.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypedDict

from mtpctl.cluster.hosts import Host, rooms, take
from mtpctl.errors import RuntimeFailure

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

READY_S = 20.0
"""Seconds that Ray has to reserve what was free a moment ago. It takes milliseconds, unless somebody else took it first."""
LOOK_S = 0.5
"""Seconds between two looks for room."""
NODE_LABEL = "ray.io/node-id"


@dataclass(frozen=True, slots=True)
class RayHost:
    """A host by its id in Ray: all its CPUs and GPUs (`whole`), and those that nobody has reserved (`free`).

    Nothing is free on a host that is being drained, where Ray starts nothing any more.
    """

    node: str
    whole: Host
    free: Host

    @property
    def name(self) -> str:
        """Its address; where several hosts have the same address, with the first characters of its id."""
        return self.whole.name


def ray_hosts() -> list[RayHost]:
    """The hosts that are alive, the head first and the others by their addresses, so that every call has them in the same order."""
    import ray
    from ray._private.state import available_resources_per_node

    free, leaving = available_resources_per_node(), draining()
    alive = sorted((node for node in ray.nodes() if node["Alive"]), key=_order)
    addresses = [str(node["NodeManagerAddress"]) for node in alive]
    found = []
    for node, address in zip(alive, addresses, strict=True):
        key = str(node["NodeID"])
        name = address if addresses.count(address) == 1 else f"{address}/{key[:6]}"
        found.append(RayHost(key, _host(node["Resources"], name), _host({} if key in leaving else free.get(key, {}), name)))
    return found


def draining() -> set[str]:
    """Ids of the hosts that are being drained: they are alive, and will be taken away soon."""
    from ray._private.state import state

    return set(state.get_draining_nodes())


def living() -> set[str]:
    """Ids of the hosts that are alive, as far as Ray knows: Ray takes some seconds to notice that a host is gone."""
    import ray

    return {str(node["NodeID"]) for node in ray.nodes() if node["Alive"]}


def _host(resources: dict[str, Any], name: str) -> Host:
    return Host(float(resources.get("CPU", 0)), float(resources.get("GPU", 0)), name)


def _order(node: dict[str, Any]) -> tuple[bool, list[int], str]:
    address = str(node["NodeManagerAddress"])
    numbers = [int(part) for part in address.split(".")] if address.replace(".", "").isdigit() else []
    return "node:__internal_head__" not in node["Resources"], numbers, str(node["NodeID"])


class Options(TypedDict, total=False):
    """Ray's options that say where an actor starts, and what it takes there."""

    num_cpus: float
    num_gpus: float
    scheduling_strategy: object


@dataclass(frozen=True, slots=True)
class Claim:
    """One actor by its name, and the CPUs and GPUs that it takes."""

    actor: str
    cpus: float
    gpus: float = 0.0


@dataclass(frozen=True, slots=True)
class Bundle:
    """Claims that are reserved together, on the host with the id `node`."""

    node: str
    claims: tuple[Claim, ...]


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of one actor. group: its reservation, common to actors that share a card; None for an actor without CPUs and GPUs.

    planned: whether the run's plan has it. Cards of other seats are Ray's choice among those with a share left.
    """

    claim: Claim
    node: str
    group: PlacementGroup | None
    planned: bool = True

    def options(self) -> Options:
        """Ray's options for an actor that sits here."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

        strategy: object = (
            NodeAffinitySchedulingStrategy(self.node, soft=False)
            if self.group is None
            else PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=0)
        )
        return {"num_cpus": self.claim.cpus, "num_gpus": self.claim.gpus, "scheduling_strategy": strategy}


@dataclass(frozen=True, slots=True)
class Found:
    """Where an actor is: the host's id, and the ids of its cards there."""

    node: str
    cards: tuple[str, ...]


def here() -> Found:
    """The host and the cards of the actor that calls this."""
    import ray

    context = ray.get_runtime_context()
    return Found(context.get_node_id(), tuple(context.get_accelerator_ids().get("GPU", ())))


class Occupied(Exception):
    """Somebody else has reserved what was free a moment ago."""


@dataclass
class Seats:
    """The seats of all actors, by their names. `found`: where actors have reported that they are.

    `awaited`: actors that are to be started in their seats, or in others where their hosts are gone, and since when on the clock of
    `time.monotonic`.
    """

    seats: dict[str, Seat] = field(default_factory=dict)
    found: dict[str, Found] = field(default_factory=dict)
    awaited: dict[str, float] = field(default_factory=dict)

    # ---------------------------------------------------------------------------------------------------- reserving

    async def reserve(self, bundles: Sequence[Bundle], *, planned: bool = True) -> None:
        """Reserve all bundles or none. Raises Occupied where Ray has no room for one of them."""
        from ray.util.placement_group import placement_group

        groups: list[PlacementGroup | None] = []
        try:
            for bundle in bundles:
                cpus, gpus = sum(claim.cpus for claim in bundle.claims), round(sum(claim.gpus for claim in bundle.claims), 4)
                wanted = {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}
                pinned = [{NODE_LABEL: bundle.node}]
                groups.append(placement_group([wanted], strategy="PACK", bundle_label_selector=pinned) if wanted else None)
            # All are waited for at once: where one does not fit, the others are held back from other users for no longer than `READY_S`.
            ready = await asyncio.gather(*(asyncio.to_thread(group.wait, READY_S) for group in groups if group is not None))
            if not all(ready):
                raise Occupied
        except BaseException:
            _remove(groups)
            raise
        for bundle, group in zip(bundles, groups, strict=True):
            for claim in bundle.claims:
                self.seats[claim.actor] = Seat(claim, bundle.node, group, planned)

    async def add(self, claim: Claim) -> Seat | None:
        """Reserve a seat for an actor that joins a run under way, or return the seat that it still has. None where there is no room."""
        kept = self.seats.get(claim.actor)
        if kept is not None and kept.node in living() - draining():
            return kept
        self.give_up(claim.actor)
        hosts = ray_hosts()
        taken = take(rooms(host.free for host in hosts), 1, claim.cpus, claim.gpus)
        if taken is None:
            return None
        try:
            await self.reserve([Bundle(hosts[taken[0]].node, (claim,))], planned=False)
        except Occupied:
            return None
        return self.seats[claim.actor]

    def give_up(self, actor: str) -> None:
        """Free the place of an actor that has left. A reservation that it shares with other actors stays, and so does its seat."""
        self.found.pop(actor, None)
        if (seat := self.seats.get(actor)) is None:
            return
        shared = any(other.group is seat.group for name, other in self.seats.items() if name != actor and other.group is not None)
        if shared and seat.node in living():
            return
        if not shared:
            _remove([seat.group])
        del self.seats[actor]

    # ------------------------------------------------------------------------------------------------------- seating

    def lost(self, actors: Sequence[str]) -> list[str]:
        """Those of the actors whose host is gone."""
        alive = living()
        return [actor for actor in actors if self.seats[actor].node not in alive]

    def close_up(self, actors: Sequence[str]) -> None:
        """Deal out the seats of these actors anew, all of which claim the same: the first actors get the seats whose hosts are alive."""
        alive = living()
        ordered = sorted((self.seats[actor] for actor in actors), key=lambda seat: seat.node not in alive)
        for actor, seat in zip(actors, ordered, strict=True):
            self.seats[actor] = replace(seat, claim=replace(seat.claim, actor=actor))

    async def take_now(self, actors: Sequence[str], *, together: int) -> list[Seat] | None:
        """The seats of these actors, new ones (each `together` on one host) where their host is gone. None where there is no room."""
        if lost := self.lost(actors):
            hosts = ray_hosts()
            free = rooms(host.free for host in hosts)
            bundles: list[Bundle] = []
            for first in range(0, len(lost), together):
                claims = [self.seats[actor].claim for actor in lost[first : first + together]]
                taken = take(free, len(claims), claims[0].cpus, claims[0].gpus)
                if taken is None:
                    return None
                bundles += [Bundle(hosts[taken[0]].node, (claim,)) for claim in claims]
            gone = [self.seats[actor].group for actor in lost]
            try:
                await self.reserve(bundles, planned=False)
            except Occupied:
                return None
            _remove(gone)
        for actor in actors:
            self.found.pop(actor, None)
        return [self.seats[actor] for actor in actors]

    async def take(self, *actors: str) -> list[Seat]:
        """The seats of these actors, all on one host. Where that host is gone, waits until another one has room for all of them."""
        with self.awaiting(actors):
            while (seats := await self.take_now(actors, together=len(actors))) is None:
                await asyncio.sleep(LOOK_S)
        return seats

    @contextmanager
    def awaiting(self, actors: Sequence[str]) -> Iterator[None]:
        """Count these actors among those that are `awaited` while the block runs."""
        self.awaited |= dict.fromkeys(actors, time.monotonic())
        try:
            yield
        finally:
            for actor in actors:
                del self.awaited[actor]

    # ------------------------------------------------------------------------------------------------------ checking

    def check(self, actor: str, found: Found) -> None:
        """Check that a started actor is on the host and the cards of its seat. Raises RuntimeFailure that names it where it is not."""
        seat = self.seats[actor]
        if found.node != seat.node:
            raise RuntimeFailure(f"{actor}: is on host {_named(found.node)}, and the plan has it on {_named(seat.node)}")
        self.found[actor] = found
        for other, its in self.found.items():
            if other == actor or its.node != found.node:
                continue
            if not (seat.planned and self.seats[other].planned):
                continue
            shared = sorted({*its.cards} & {*found.cards})
            mates = seat.group is not None and self.seats[other].group is seat.group
            if shared and not mates:
                raise RuntimeFailure(f"{actor}: has card {shared[0]} of host {_named(found.node)}, which the plan gives to {other}")
            if mates and found.cards and not shared:
                raise RuntimeFailure(
                    f"{actor}: has card {found.cards[0]} of host {_named(found.node)}, and the plan has it share that of {other}"
                )

    def host(self, actor: str) -> str:
        """The name of the host that an actor sits on."""
        return _named(self.seats[actor].node)

    def told(self) -> str:
        """The actors of each host, in one line."""
        at: dict[str, list[str]] = {}
        for actor, seat in self.seats.items():
            at.setdefault(seat.node, []).append(actor)
        return "; ".join(f"{_named(node)}: {', '.join(actors)}" for node, actors in at.items())


def _remove(groups: Sequence[PlacementGroup | None]) -> None:
    from ray.util.placement_group import remove_placement_group

    for group in groups:
        if group is not None:
            remove_placement_group(group)


def _named(node: str) -> str:
    return next((host.name for host in ray_hosts() if host.node == node), node[:6])
