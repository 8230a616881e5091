"""GPUs that several processes of a run share, and the cores of their hosts: lines and cautions of the plan."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from mtpctl.cluster.hosts import Host
from mtpctl.families.shape import ModelShape
from mtpctl.plan.memory import GIB, engine_memory, logprob_memory, trainer_memory
from mtpctl.plan.placement import Actor, Placement, core_shortage, engine_memory_share
from mtpctl.recipe.schema import Recipe
from mtpctl.telemetry.versions import gpu_memory_gib, mps_state


def sharing_cautions(recipe: Recipe, placement: Placement, hosts: Sequence[Host] | None = None) -> list[str]:
    """Cautions about too few cores, and about GPUs whose processes take turns.

    hosts: of the cluster that the run joins. None: this machine, if it has a GPU; otherwise the plan is for another one.
    """
    here = hosts is None
    if here and gpu_memory_gib() is None:
        return []
    cores = {0: float(len(os.sched_getaffinity(0)))} if hosts is None else {i: host.cpus for i, host in enumerate(hosts)}
    cautions = [shortage] if (shortage := core_shortage(recipe, placement, cores)) else []
    processes = Counter((actor.host, card) for actor in placement.actors for card in actor.cards)
    if processes and max(processes.values()) > 1 and here and mps_state() == "off":
        cautions.append(
            f"cluster: {max(processes.values())} processes share a GPU and take turns on it; with CUDA MPS their kernels run concurrently: "
            "start nvidia-cuda-mps-control -d before the run"
        )
    return cautions


def planned_bytes(recipe: Recipe, shape: ModelShape, actor: Actor) -> int:
    """Planned memory of an actor on its card: a rank's estimate, or an engine's share. Requires `cluster.gpu_gib` for the latter."""
    if actor.role == "trainer":
        return trainer_memory(recipe, shape).total
    if actor.role != "rollout":
        return logprob_memory(recipe, shape).total
    if recipe.rollout.kv_cache_bytes is not None:
        memory = engine_memory(recipe, shape, actor.index)
        return memory.weights + memory.reserve + recipe.rollout.kv_cache_bytes
    return int((recipe.cluster.gpu_gib or 0.0) * GIB * engine_memory_share(recipe, actor.index))


def shared_gpu_lines(recipe: Recipe, shape: ModelShape, placement: Placement, hosts: Sequence[str]) -> Iterator[str]:
    """A line for each GPU that several actors share: the actors, and their planned memory. Empty if the size of the GPUs is unknown.

    hosts: names of the hosts; empty if they are not known yet.
    """
    cards: defaultdict[tuple[int, int], list[Actor]] = defaultdict(list)
    for actor in placement.actors:
        for card in actor.cards:
            cards[actor.host, card].append(actor)
    gib, head = recipe.cluster.gpu_gib, "shared"
    for (host, card), actors in cards.items() if gib is not None else ():
        if len(actors) > 1:
            sizes = [planned_bytes(recipe, shape, actor) for actor in actors]
            parts = ", ".join(f"{actor.name} {format_bytes(size)}" for actor, size in zip(actors, sizes, strict=True))
            name = hosts[host] if hosts else host
            yield f"{head:10} host {name}, GPU {card}: {parts}; {format_bytes(sum(sizes))} of {gib:.4g} GiB"
            head = ""


def format_bytes(value: int) -> str:
    """A size with one decimal and a binary unit."""
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value} B"
