"""Place trainer ranks, rollout engines, log-prob ranks and a teacher's on hosts with CPUs and GPUs.

Ranks are placed in order, each group on the first host that has room. Trainer ranks fill hosts from the front, each tensor-parallel group
on one host where one can hold it; an engine never spans hosts, nor a share of a card two cards.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mtpctl.cluster.hosts import Host, Room, Taken, rooms, take
from mtpctl.errors import ClusterResources, UserError
from mtpctl.recipe.schema import Recipe

Role = Literal["trainer", "rollout", "logprob", "teacher"]
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Actor:
    """One rank: `index` counts engines or servers, `rank` the processes of one. `gpus` is a fraction where a card is shared.

    `cards`: the numbers of its cards among those that the plan uses of its host.
    """

    role: Role
    index: int
    rank: int
    host: int
    cpus: float
    gpus: float
    cards: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return (
            f"{self.role}-{self.rank}" if self.role == "trainer" else f"{self.role}-{self.index}" + (f".{self.rank}" if self.rank else "")
        )


@dataclass(frozen=True, slots=True)
class Bundle:
    """CPUs and GPUs that are reserved together on one host, for the ranks that share its cards, or for all ranks of an engine."""

    host: int
    actors: tuple[Actor, ...]

    @property
    def cpus(self) -> float:
        """CPUs in all."""
        return sum(actor.cpus for actor in self.actors)

    @property
    def gpus(self) -> float:
        """GPUs in all: whole ones, or a share of one."""
        return round(sum(actor.gpus for actor in self.actors), 4)


@dataclass(frozen=True, slots=True)
class Placement:
    """All actors of a run, their device, and the number of hosts in use."""

    device: Device
    actors: tuple[Actor, ...]
    hosts: int

    def of(self, role: Role) -> tuple[Actor, ...]:
        return tuple(actor for actor in self.actors if actor.role == role)

    @property
    def cpus(self) -> float:
        return sum(actor.cpus for actor in self.actors)

    @property
    def gpus(self) -> float:
        return sum(actor.gpus for actor in self.actors)

    @property
    def cards(self) -> int:
        """Cards in use: one that several share is one, and one that is used in part is one too."""
        return len({(actor.host, card) for actor in self.actors for card in actor.cards})

    def bundles(self) -> list[Bundle]:
        """What is to be reserved: a bundle for all that share cards, one for each engine, and one for each other rank without a card."""
        bundles: list[list[Actor]] = []
        for actor in self.actors:
            bundles = _joined(bundles, actor)
        return [Bundle(bundle[0].host, tuple(bundle)) for bundle in bundles]


def _joined(bundles: list[list[Actor]], actor: Actor) -> list[list[Actor]]:
    """The bundles with one actor more, which joins those that it shares a card or an engine with."""

    def together(other: Actor) -> bool:
        engine = actor.role == other.role == "rollout" and actor.index == other.index
        return actor.host == other.host and (engine or bool({*actor.cards} & {*other.cards}))

    near = [bundle for bundle in bundles if any(map(together, bundle))]
    return [bundle for bundle in bundles if bundle not in near] + [[*(a for bundle in near for a in bundle), actor]]


def place(recipe: Recipe, hosts: Sequence[Host] | None = None, *, engines: int | None = None) -> Placement:
    """Place a recipe's actors, with as many rollout engines as it has at least, or `engines` of them.

    `hosts` are those of a running cluster; without them, this machine for CPU, and for CUDA as many hosts of
    `cluster.gpus_per_node` cards as it takes, or one of `cluster.num_gpus` where that is set. Raises ClusterResources naming
    what is asked for and what there is, UserError for an engine that no host can hold, or that Ray cannot be asked cards for.
    """
    device = recipe.device
    engines = recipe.rollout.replica_range.min if engines is None else engines
    groups = _groups(recipe, device, engines)
    if hosts is None:
        hosts = _planned_hosts(recipe, device, sum(cpus * n for _, _, n, cpus, _ in groups), sum(n for _, _, n, _, _ in groups))
    free = rooms(hosts, sum(n * math.ceil(gpus) for _, _, n, _, gpus in groups))
    actors: list[Actor] = []
    for role, index, ranks, cpus, gpus in groups:
        together = recipe.train.parallel.tp if role == "trainer" else ranks
        for first in range(0, ranks, together):
            taken = _take_group(free, together, cpus, gpus, apart=role == "trainer" and not _one_holds(hosts, together, cpus, gpus))
            if taken is None:
                raise _too_few(recipe, device, groups, hosts)
            actors += [Actor(role, index, first + i, host, cpus, gpus, cards) for i, (host, cards) in enumerate(taken)]
    return Placement(device, tuple(actors), len({actor.host for actor in actors}))


def most_engines(recipe: Recipe, hosts: Sequence[Host] | None) -> int:
    """How many rollout engines these hosts have room for, of those that the recipe allows. Raises what `place` raises for the least."""
    bounds = recipe.rollout.replica_range
    place(recipe, hosts)
    for engines in range(bounds.max, bounds.min, -1):
        try:
            place(recipe, hosts, engines=engines)
        except ClusterResources:
            continue
        return engines
    return bounds.min


def _one_holds(hosts: Sequence[Host], ranks: int, cpus: float, gpus: float) -> bool:
    """Whether a host that is empty holds this many ranks."""
    return any(take([room], ranks, cpus, gpus) is not None for room in rooms(hosts, ranks * math.ceil(gpus)))


def _take_group(free: list[Room], ranks: int, cpus: float, gpus: float, *, apart: bool) -> list[tuple[int, tuple[int, ...]]] | None:
    """Host and cards of each rank, all on one host unless `apart`; None where there is no room."""
    parts: list[Taken | None] = [take(free, 1, cpus, gpus) for _ in range(ranks)] if apart else [take(free, ranks, cpus, gpus)]
    found: list[tuple[int, tuple[int, ...]]] = []
    for part in parts:
        if part is None:
            return None
        found += [(part[0], cards) for cards in part[1]]
    return found


Group = tuple[Role, int, int, float, float]
"""Role, index, ranks, and the CPUs and GPUs of each rank."""


def _groups(recipe: Recipe, device: Device, engines: int) -> list[Group]:
    train, rollout, server = recipe.train, recipe.rollout, recipe.logprob
    cuda = device == "cuda"
    groups: list[Group] = [("trainer", 0, train.parallel.world_size, max(1, train.threads), train.gpus if cuda else 0.0)]
    if "rl" in train.stages:
        card = engine_share(recipe) if cuda else 0.0
        groups += [("rollout", i, rollout.tp, max(1, rollout.threads), card) for i in range(engines)]
        if server.standalone:
            # On CPUs, scoring comes in bursts while the others wait, and claims no core of its own.
            claim = (1, server.gpus) if cuda else (0, 0.0)
            groups += [("logprob", i, server.parallel.world_size, *claim) for i in range(server.replicas)]
        if (teacher := train.rl.teacher) is not None and teacher.served:
            claim = (1, teacher.gpus) if cuda else (0, 0.0)
            groups += [("teacher", i, teacher.parallel.world_size, *claim) for i in range(teacher.replicas)]
    per_node, fields = recipe.cluster.gpus_per_node, {"trainer": "train", "teacher": "train.rl.teacher"}
    for role, _, ranks, _, gpus in groups:
        field = fields.get(role, role)
        if role == "rollout" and ranks > 1 and 0 < gpus < 1:
            raise UserError(
                f"rollout.gpus: {gpus:g} of a card for each of rollout.tp: {ranks} ranks; they take whole cards, so set it to 1"
            )
        if role != "rollout" and ranks > 1 and 0 < gpus <= 0.5:
            raise UserError(
                f"{field}.gpus: {gpus:g} puts two of {field}.parallel's {ranks} ranks on one card, where NCCL does not join them; "
                "take more than 0.5, or one rank"
            )
        if gpus > 1 and gpus % 1:
            raise UserError(f"{field}.gpus: {gpus:g} cards cannot be handed to one rank; take a whole number, or less than 1")
        if role != "trainer" and ranks * gpus > per_node:
            split = f"{field}.{'tp' if role == 'rollout' else 'parallel'}"
            raise UserError(f"{split}: {ranks} ranks do not fit a host of cluster.gpus_per_node: {per_node}; lower it")
    return groups


def engine_share(recipe: Recipe) -> float:
    """Share of a card for each rank of a rollout engine: `rollout.gpus`, or what a log-prob rank on the same card leaves."""
    server = recipe.logprob
    return recipe.rollout.gpus or (1 - server.gpus if server.standalone and server.gpus < 1 else 1.0)


def _planned_hosts(recipe: Recipe, device: Device, cpus: float, ranks: int) -> list[Host]:
    cluster = recipe.cluster
    if device == "cpu":
        return [Host(cluster.num_cpus or os.cpu_count() or 1)]
    if cluster.num_gpus is not None:
        return [Host(cluster.num_cpus or cpus, cluster.num_gpus)]
    # As many as it takes: a trainer rank needs at most a host of its own, and so does an engine.
    return [Host(cpus, cluster.gpus_per_node) for _ in range(ranks)]


def _too_few(recipe: Recipe, device: Device, groups: list[Group], hosts: Sequence[Host]) -> ClusterResources:
    asked: dict[str, float] = {}
    for role, _, ranks, cpus, gpus in groups:
        asked[role] = asked.get(role, 0) + ranks * (gpus if device == "cuda" else cpus)
    what = "GPUs" if device == "cuda" else "CPUs"
    there = sum(host.gpus if device == "cuda" else host.cpus for host in hosts)
    if sum(asked.values()) <= there:
        what += ", each share on one card and each engine on one host,"
    parts = ", ".join(f"{role} {amount:g}" for role, amount in asked.items())
    mend = "lower replicas or threads, or set cluster.num_cpus"
    if (engines := sum(role == "rollout" for role, *_ in groups)) > recipe.rollout.replica_range.min:
        mend = f"lower rollout.replicas.max: {engines}, or join a cluster that hosts can join (cluster.address)"
    elif device == "cuda":
        mend = "lower train.parallel, rollout.replicas or rollout.tp"
    return ClusterResources(f"cluster: {sum(asked.values()):g} {what} are asked for ({parts}) and {there:g} are there; {mend}")
