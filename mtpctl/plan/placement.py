"""Places the ranks of trainer, rollout engines, log-prob server and teacher on hosts with CPUs and GPUs.

Ranks are placed in order, each group on the first host with capacity. A tensor-parallel group of the trainer stays on one host if a host is
large enough. An engine never spans hosts, and a share of a GPU never spans GPUs. Engines on the trainer's GPUs are distributed evenly
over its ranks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from mtpctl.cluster.hosts import Capacity, Host, allocate, list_capacities
from mtpctl.errors import ClusterResources, UserError
from mtpctl.recipe.schema import Recipe

Role = Literal["trainer", "rollout", "logprob", "teacher"]
Device = Literal["cpu", "cuda"]

ENGINE_MEMORY_SHARE = 0.85
"""Default of `rollout.gpu_memory`: CUDA graphs, the CUDA context and fragmentation take the rest of a GPU."""
MAX_MEMORY_OF_SHARE = 0.95
"""Maximum of the default of `rollout.gpu_memory`, as a fraction of the engine's share of the GPU."""
ENGINE_CORES = 3
"""Cores that an engine on a GPU keeps busy at full load: engine core, actor with front end, and the model's process."""


@dataclass(frozen=True, slots=True)
class Actor:
    """One rank. index: number of its engine or server. rank: its rank in that engine or server. gpus: a fraction if it shares a GPU.

    gpu_ids: indices of its GPUs among those that the plan uses on the host.
    """

    role: Role
    index: int
    rank: int
    host: int
    cpus: float
    gpus: float
    gpu_ids: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        if self.role == "trainer":
            return f"{self.role}-{self.rank}"
        return f"{self.role}-{self.index}" + (f".{self.rank}" if self.rank else "")


@dataclass(frozen=True, slots=True)
class Bundle:
    """CPUs and GPUs to reserve together on one host: for ranks that share GPUs, or for all ranks of an engine."""

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
    def gpu_count(self) -> int:
        """Number of GPUs in use, in whole or in part."""
        return len({(actor.host, gpu) for actor in self.actors for gpu in actor.gpu_ids})

    def bundles(self) -> list[Bundle]:
        """The bundles to reserve: one for all ranks that share GPUs, one for each engine, and one for each other rank."""
        bundles: list[list[Actor]] = []
        for actor in self.actors:
            bundles = _add_actor(bundles, actor)
        return [Bundle(bundle[0].host, tuple(bundle)) for bundle in bundles]


def _add_actor(bundles: list[list[Actor]], actor: Actor) -> list[list[Actor]]:
    """Add an actor to the bundles, merging the bundles with which it shares a GPU or an engine."""

    def shares_bundle(other: Actor) -> bool:
        same_engine = actor.role == other.role == "rollout" and actor.index == other.index
        return actor.host == other.host and (same_engine or bool({*actor.gpu_ids} & {*other.gpu_ids}))

    shared_bundles = [bundle for bundle in bundles if any(map(shares_bundle, bundle))]
    return [bundle for bundle in bundles if bundle not in shared_bundles] + [[*chain.from_iterable(shared_bundles), actor]]


def place(recipe: Recipe, hosts: Sequence[Host] | None = None, *, engines: int | None = None) -> Placement:
    """Place a recipe's actors, with `engines` rollout engines (default: the minimum of the recipe).

    hosts: the hosts of a running cluster. None assumes this machine for CPU. For CUDA it assumes one host of `cluster.num_gpus` GPUs if
    set, else as many hosts of `cluster.gpus_per_node` GPUs as needed. Raises ClusterResources if the hosts are too small, and UserError if
    an engine fits no host, or if Ray cannot allocate the GPU counts.
    """
    device = recipe.device
    engines = recipe.rollout.replica_range.min if engines is None else engines
    groups = _actor_groups(recipe, device, engines)
    if hosts is None:
        hosts = _planned_hosts(recipe, device, sum(cpus * n for _, _, n, cpus, _ in groups), sum(n for _, _, n, _, _ in groups))
    free_capacity = list_capacities(hosts, sum(n * math.ceil(gpus) for _, _, n, _, gpus in groups))
    actors: list[Actor] = []
    for role, index, ranks, cpus, gpus in groups:
        if role == "rollout" and device == "cuda" and index < recipe.rollout.on_trainer_gpus:
            trainer = actors[index % recipe.train.parallel.world_size]
            actors.append(_place_on_trainer_gpu(free_capacity, trainer, Actor(role, index, 0, trainer.host, cpus, gpus, trainer.gpu_ids)))
            continue
        group_size = recipe.train.parallel.tp if role == "trainer" else ranks
        split = role == "trainer" and not _fits_one_host(hosts, group_size, cpus, gpus)
        for first_rank in range(0, ranks, group_size):
            allocated = _allocate_group(free_capacity, group_size, cpus, gpus, split=split)
            if allocated is None:
                raise _capacity_error(recipe, device, groups, hosts)
            actors += [Actor(role, index, first_rank + i, host, cpus, gpus, ids) for i, (host, ids) in enumerate(allocated)]
    return Placement(device, tuple(actors), len({actor.host for actor in actors}))


def _place_on_trainer_gpu(free: list[Capacity], trainer: Actor, engine: Actor) -> Actor:
    """Allocate an engine on a trainer rank's GPU, and return it. Raises ClusterResources if the host has too few CPUs."""
    cpus, shares = free[trainer.host]
    if cpus + 1e-9 < engine.cpus:
        raise ClusterResources(
            f"rollout.on_trainer_gpus: {trainer.name}'s host has {cpus:g} CPUs left, {engine.name} needs {engine.cpus:g}; "
            "lower on_trainer_gpus or rollout.threads"
        )
    remaining = list(shares)
    remaining[trainer.gpu_ids[0]] -= engine.gpus
    free[trainer.host] = (cpus - engine.cpus, remaining)
    return engine


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
    return any(allocate([capacity], ranks, cpus, gpus) is not None for capacity in list_capacities(hosts, ranks * math.ceil(gpus)))


def _allocate_group(free: list[Capacity], ranks: int, cpus: float, gpus: float, *, split: bool) -> list[tuple[int, tuple[int, ...]]] | None:
    """Allocate a host and GPUs for each rank, all on one host unless `split`. Returns None if there is no capacity."""
    allocated: list[tuple[int, tuple[int, ...]]] = []
    for count in [1] * ranks if split else [ranks]:
        allocation = allocate(free, count, cpus, gpus)
        if allocation is None:
            return None
        allocated += [(allocation[0], ids) for ids in allocation[1]]
    return allocated


Group = tuple[Role, int, int, float, float]
"""Role, index, ranks, and the CPUs and GPUs of each rank."""


def _actor_groups(recipe: Recipe, device: Device, engines: int) -> list[Group]:
    train, rollout, server = recipe.train, recipe.rollout, recipe.logprob
    cuda = device == "cuda"
    groups: list[Group] = [("trainer", 0, train.parallel.world_size, max(1, train.threads), train.gpus if cuda else 0.0)]
    if train.needs_rollout:
        shares = [engine_share(recipe, i) if cuda else 0.0 for i in range(engines)]
        groups += [("rollout", i, rollout.tp, max(1, rollout.threads), share) for i, share in enumerate(shares)]
        if recipe.runs_logprob_server:
            # On CPUs, scoring alternates with the other actors, so it needs no reserved core.
            resources = (1, server.gpus) if cuda else (0, 0.0)
            groups += [("logprob", i, server.parallel.world_size, *resources) for i in range(server.replicas)]
        if (teacher := recipe.served_teacher) is not None:
            resources = (1, teacher.gpus) if cuda else (0, 0.0)
            groups += [("teacher", i, teacher.parallel.world_size, *resources) for i in range(teacher.replicas)]
    per_node, fields = recipe.cluster.gpus_per_node, {"trainer": "train", "teacher": "train.rl.teacher"}
    for role, _, ranks, _, gpus in groups:
        field = fields.get(role, role)
        if role == "rollout" and ranks > 1 and 0 < gpus < 1:
            raise UserError(f"rollout.gpus: {gpus:g} of a GPU for each of rollout.tp: {ranks} ranks, which need one GPU each; set it to 1")
        if role != "rollout" and ranks > 1 and 0 < gpus <= 0.5:
            raise UserError(
                f"{field}.gpus: {gpus:g} puts two of the {ranks} ranks of {field}.parallel on one GPU, which NCCL does not support; "
                "use more than 0.5, or one rank"
            )
        if gpus > 1 and gpus % 1:
            raise UserError(f"{field}.gpus: {gpus:g} GPUs cannot be assigned to one rank; use a whole number, or less than 1")
        if role != "trainer" and ranks * gpus > per_node:
            split = f"{field}.{'tp' if role == 'rollout' else 'parallel'}"
            raise UserError(f"{split}: {ranks} ranks do not fit a host of cluster.gpus_per_node: {per_node}; lower it")
    return groups


def engine_share(recipe: Recipe, index: int | None = None) -> float:
    """Share of a GPU for each rank of a rollout engine.

    This is `rollout.gpus`. Its default is what a log-prob rank leaves of its GPU if it uses only a share, otherwise 1. index: number of the
    engine. The first `rollout.on_trainer_gpus` engines instead share the remainder of the trainer's GPUs equally. None: an engine on other
    GPUs.
    """
    server, rollout = recipe.logprob, recipe.rollout
    if index is not None and index < rollout.on_trainer_gpus:
        engines_per_gpu = math.ceil(rollout.on_trainer_gpus / recipe.train.parallel.world_size)
        return math.floor(1e4 * (1 - recipe.train.gpus) / engines_per_gpu + 1e-6) / 1e4  # Ray's resolution
    return rollout.gpus or (1 - server.gpus if server.standalone and server.gpus < 1 else 1.0)


def engine_memory_share(recipe: Recipe, index: int | None = None) -> float:
    """Share of a GPU's memory for an engine: `rollout.gpu_memory`, or its default, which is the maximum on the trainer's GPUs."""
    share = engine_share(recipe, index)
    default, configured = min(ENGINE_MEMORY_SHARE, MAX_MEMORY_OF_SHARE * share), recipe.rollout.gpu_memory
    if configured is None:
        return default
    return min(configured, default) if index is not None and index < recipe.rollout.on_trainer_gpus else configured


def shares_gpu(recipe: Recipe, index: int | None = None) -> bool:
    """Whether other processes may use the GPU of an engine. index: as in `engine_share`."""
    return recipe.device == "cuda" and engine_share(recipe, index) < 1


def core_shortage(recipe: Recipe, placement: Placement, cores: Mapping[int, float]) -> str:
    """A caution about the first host whose processes keep more cores busy than it has; empty if there is none.

    cores: number of cores by host. On CPUs the placement itself counts the cores.
    """
    if placement.device == "cpu":
        return ""
    for host, available in cores.items():
        actors = [actor for actor in placement.actors if actor.host == host]
        engines = len({actor.index for actor in actors if actor.role == "rollout"})
        ranks = sum(actor.role == "rollout" for actor in actors)
        others = sum(actor.cpus for actor in actors if actor.role != "rollout")
        # Each rank of an engine with several ranks is a separate process; the controller runs on the first host.
        busy = engines * ENGINE_CORES + (ranks - engines) * max(1, recipe.rollout.threads) + others + (host == 0)
        if engines and busy > available:
            return (
                f"rollout.replicas: {engines} engine(s) with {ENGINE_CORES} busy cores each and the other processes need {busy:g} cores of "
                f"host {host}, which has {available:g}, and slow each other down; lower replicas, or use a host with more cores"
            )
    return ""


def _planned_hosts(recipe: Recipe, device: Device, cpus: float, ranks: int) -> list[Host]:
    cluster = recipe.cluster
    if device == "cpu":
        return [Host(cluster.num_cpus or os.cpu_count() or 1)]
    if cluster.num_gpus is not None:
        return [Host(cluster.num_cpus or cpus, cluster.num_gpus)]
    # At most one host for each rank.
    return [Host(cpus, cluster.gpus_per_node) for _ in range(ranks)]


def _capacity_error(recipe: Recipe, device: Device, groups: list[Group], hosts: Sequence[Host]) -> ClusterResources:
    needed: dict[str, float] = {}
    for role, _, ranks, cpus, gpus in groups:
        needed[role] = needed.get(role, 0) + ranks * (gpus if device == "cuda" else cpus)
    unit = "GPUs" if device == "cuda" else "CPUs"
    available = sum(host.gpus if device == "cuda" else host.cpus for host in hosts)
    if sum(needed.values()) <= available:
        unit += ", each share on one GPU and each engine on one host,"
    role_amounts = ", ".join(f"{role} {amount:g}" for role, amount in needed.items())
    fix = "lower replicas or threads, or set cluster.num_cpus"
    if (engines := sum(role == "rollout" for role, *_ in groups)) > recipe.rollout.replica_range.min:
        fix = f"lower rollout.replicas.max: {engines}, or use a cluster that more hosts can join (cluster.address)"
    elif device == "cuda":
        fix = "lower train.parallel, rollout.replicas or rollout.tp"
    return ClusterResources(f"cluster: {sum(needed.values()):g} {unit} are needed ({role_amounts}), but {available:g} are available; {fix}")
