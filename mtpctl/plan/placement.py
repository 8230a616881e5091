"""Places the ranks of trainer, rollout engines, log-prob server and teacher on hosts with CPUs and GPUs.

Ranks are placed in order, each group on the first host with capacity. A tensor-parallel group of the trainer stays on one host if a host is
large enough. An engine never spans hosts, and a share of a card never spans cards.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mtpctl.cluster.hosts import Allocation, Capacity, Host, allocate, capacities
from mtpctl.errors import ClusterResources, UserError
from mtpctl.recipe.schema import Recipe

Role = Literal["trainer", "rollout", "logprob", "teacher"]
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Actor:
    """One rank. index: number of its engine or server. rank: its rank therein. gpus: a fraction if it shares a card.

    cards: indices of its cards among those that the plan uses on the host.
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
        if self.role == "trainer":
            return f"{self.role}-{self.rank}"
        return f"{self.role}-{self.index}" + (f".{self.rank}" if self.rank else "")


@dataclass(frozen=True, slots=True)
class Bundle:
    """CPUs and GPUs to reserve together on one host: for ranks that share cards, or for all ranks of an engine."""

    host: int
    actors: tuple[Actor, ...]

    @property
    def cpus(self) -> float:
        return sum(actor.cpus for actor in self.actors)

    @property
    def gpus(self) -> float:
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
        """Number of cards in use, in whole or in part."""
        return len({(actor.host, card) for actor in self.actors for card in actor.cards})

    def bundles(self) -> list[Bundle]:
        """The bundles to reserve: one for all ranks that share cards, one for each engine, and one for each other rank."""
        bundles: list[list[Actor]] = []
        for actor in self.actors:
            bundles = _joined(bundles, actor)
        return [Bundle(bundle[0].host, tuple(bundle)) for bundle in bundles]


def _joined(bundles: list[list[Actor]], actor: Actor) -> list[list[Actor]]:
    """Add an actor to the bundles, and merge those with which it shares a card or an engine."""

    def shares(other: Actor) -> bool:
        engine = actor.role == other.role == "rollout" and actor.index == other.index
        return actor.host == other.host and (engine or bool({*actor.cards} & {*other.cards}))

    shared = [bundle for bundle in bundles if any(map(shares, bundle))]
    return [bundle for bundle in bundles if bundle not in shared] + [[*(a for bundle in shared for a in bundle), actor]]


def place(recipe: Recipe, hosts: Sequence[Host] | None = None, *, engines: int | None = None) -> Placement:
    """Place a recipe's actors, with `engines` rollout engines (default: the minimum of the recipe).

    hosts: the hosts of a running cluster. None assumes this machine for CPU. For CUDA it assumes one host of `cluster.num_gpus` cards if
    set, else as many hosts of `cluster.gpus_per_node` cards as needed. Raises ClusterResources if the hosts are too small, and UserError if
    an engine fits no host, or if Ray cannot allocate the GPU counts.
    """
    device = recipe.device
    engines = recipe.rollout.replica_range.min if engines is None else engines
    groups = _groups(recipe, device, engines)
    if hosts is None:
        hosts = _planned_hosts(recipe, device, sum(cpus * n for _, _, n, cpus, _ in groups), sum(n for _, _, n, _, _ in groups))
    free = capacities(hosts, sum(n * math.ceil(gpus) for _, _, n, _, gpus in groups))
    actors: list[Actor] = []
    for role, index, ranks, cpus, gpus in groups:
        together = recipe.train.parallel.tp if role == "trainer" else ranks
        for first in range(0, ranks, together):
            taken = _take_group(free, together, cpus, gpus, apart=role == "trainer" and not _fits_one_host(hosts, together, cpus, gpus))
            if taken is None:
                raise _capacity_error(recipe, device, groups, hosts)
            actors += [Actor(role, index, first + i, host, cpus, gpus, cards) for i, (host, cards) in enumerate(taken)]
    return Placement(device, tuple(actors), len({actor.host for actor in actors}))


def max_engines(recipe: Recipe, hosts: Sequence[Host] | None) -> int:
    """Maximum number of rollout engines within the recipe's bounds that fits these hosts. Raises like `place` if the minimum does not."""
    bounds = recipe.rollout.replica_range
    place(recipe, hosts)
    for engines in range(bounds.max, bounds.min, -1):
        try:
            place(recipe, hosts, engines=engines)
        except ClusterResources:
            continue
        return engines
    return bounds.min


def _fits_one_host(hosts: Sequence[Host], ranks: int, cpus: float, gpus: float) -> bool:
    """Whether this many ranks fit one of the hosts when it is empty."""
    return any(allocate([capacity], ranks, cpus, gpus) is not None for capacity in capacities(hosts, ranks * math.ceil(gpus)))


def _take_group(free: list[Capacity], ranks: int, cpus: float, gpus: float, *, apart: bool) -> list[tuple[int, tuple[int, ...]]] | None:
    """Allocate a host and cards for each rank, all on one host unless `apart`. Returns None if there is no capacity."""
    parts: list[Allocation | None] = [allocate(free, 1, cpus, gpus) for _ in range(ranks)] if apart else [allocate(free, ranks, cpus, gpus)]
    taken: list[tuple[int, tuple[int, ...]]] = []
    for part in parts:
        if part is None:
            return None
        taken += [(part[0], cards) for cards in part[1]]
    return taken


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
            # On CPUs, scoring alternates with the other actors, so it needs no reserved core.
            claim = (1, server.gpus) if cuda else (0, 0.0)
            groups += [("logprob", i, server.parallel.world_size, *claim) for i in range(server.replicas)]
        if (teacher := train.rl.teacher) is not None and teacher.served:
            claim = (1, teacher.gpus) if cuda else (0, 0.0)
            groups += [("teacher", i, teacher.parallel.world_size, *claim) for i in range(teacher.replicas)]
    per_node, fields = recipe.cluster.gpus_per_node, {"trainer": "train", "teacher": "train.rl.teacher"}
    for role, _, ranks, _, gpus in groups:
        field = fields.get(role, role)
        if role == "rollout" and ranks > 1 and 0 < gpus < 1:
            raise UserError(f"rollout.gpus: {gpus:g} of a card for each of rollout.tp: {ranks} ranks, which need whole cards; set it to 1")
        if role != "rollout" and ranks > 1 and 0 < gpus <= 0.5:
            raise UserError(
                f"{field}.gpus: {gpus:g} puts two of {field}.parallel's {ranks} ranks on one card, which NCCL does not support; "
                "use more than 0.5, or one rank"
            )
        if gpus > 1 and gpus % 1:
            raise UserError(f"{field}.gpus: {gpus:g} cards cannot be assigned to one rank; use a whole number, or less than 1")
        if role != "trainer" and ranks * gpus > per_node:
            split = f"{field}.{'tp' if role == 'rollout' else 'parallel'}"
            raise UserError(f"{split}: {ranks} ranks do not fit a host of cluster.gpus_per_node: {per_node}; lower it")
    return groups


def engine_share(recipe: Recipe) -> float:
    """Share of a card for each rank of a rollout engine: `rollout.gpus`, or the share that a log-prob rank leaves."""
    server = recipe.logprob
    return recipe.rollout.gpus or (1 - server.gpus if server.standalone and server.gpus < 1 else 1.0)


def _planned_hosts(recipe: Recipe, device: Device, cpus: float, ranks: int) -> list[Host]:
    cluster = recipe.cluster
    if device == "cpu":
        return [Host(cluster.num_cpus or os.cpu_count() or 1)]
    if cluster.num_gpus is not None:
        return [Host(cluster.num_cpus or cpus, cluster.num_gpus)]
    # At most one host for each trainer rank and engine.
    return [Host(cpus, cluster.gpus_per_node) for _ in range(ranks)]


def _capacity_error(recipe: Recipe, device: Device, groups: list[Group], hosts: Sequence[Host]) -> ClusterResources:
    needed: dict[str, float] = {}
    for role, _, ranks, cpus, gpus in groups:
        needed[role] = needed.get(role, 0) + ranks * (gpus if device == "cuda" else cpus)
    unit = "GPUs" if device == "cuda" else "CPUs"
    available = sum(host.gpus if device == "cuda" else host.cpus for host in hosts)
    if sum(needed.values()) <= available:
        unit += ", each share on one card and each engine on one host,"
    parts = ", ".join(f"{role} {amount:g}" for role, amount in needed.items())
    fix = "lower replicas or threads, or set cluster.num_cpus"
    if (engines := sum(role == "rollout" for role, *_ in groups)) > recipe.rollout.replica_range.min:
        fix = f"lower rollout.replicas.max: {engines}, or join a cluster that hosts can join (cluster.address)"
    elif device == "cuda":
        fix = "lower train.parallel, rollout.replicas or rollout.tp"
    return ClusterResources(f"cluster: {sum(needed.values()):g} {unit} are needed ({parts}), but {available:g} are available; {fix}")
