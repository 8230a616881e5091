"""Free capacity of hosts: their CPUs and the free share of each GPU, and the allocation of ranks from it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Host:
    """CPUs and GPUs of one machine, and its name if known. The fractional part of `gpus` is the free share of one GPU."""

    cpus: float
    gpus: float = 0
    name: str = ""


Capacity = tuple[float, list[float]]
"""Free CPUs of a host, and the free share of each of its GPUs."""

Allocation = tuple[int, list[tuple[int, ...]]]
"""The index of a host, and for each rank the indices of its GPUs there."""


def list_capacities(hosts: Iterable[Host], max_gpus: float = math.inf) -> list[Capacity]:
    """The capacity of each host, with at most `max_gpus` GPUs."""
    return [(host.cpus, _gpu_shares(min(host.gpus, max_gpus))) for host in hosts]


def _gpu_shares(gpus: float) -> list[float]:
    gpus = round(gpus, 4)  # Ray's resolution
    whole_gpus = int(gpus)
    return [1.0] * whole_gpus + ([gpus - whole_gpus] if gpus > whole_gpus else [])


def allocate(free_capacities: list[Capacity], ranks: int, cpus: float, gpus: float) -> Allocation | None:
    """Allocate CPUs and GPUs for all ranks on the first host with capacity, and subtract them from its entry. None if there is no host."""
    for host, (free_cpus, shares) in enumerate(free_capacities):
        allocated = allocate_gpus(shares, ranks, gpus)
        if free_cpus + 1e-9 >= ranks * cpus and allocated is not None:
            free_capacities[host] = (free_cpus - ranks * cpus, allocated[0])
            return host, allocated[1]
    return None


def allocate_gpus(shares: list[float], ranks: int, gpus: float) -> tuple[list[float], list[tuple[int, ...]]] | None:
    """Allocate `gpus` to each rank. Returns the remaining free shares of the GPUs and the GPUs of each rank; None if they do not suffice.

    As in Ray, a share is taken from the GPU with the smallest sufficient free share.
    """
    free_shares, gpus_of_ranks = list(shares), []
    for _ in range(ranks):
        candidates = [gpu for gpu, free_share in enumerate(free_shares) if free_share + 1e-9 >= min(gpus, 1)]
        selected_gpus = sorted(candidates, key=free_shares.__getitem__)[: math.ceil(gpus)]
        if len(selected_gpus) < gpus:
            return None
        for gpu in selected_gpus:
            free_shares[gpu] -= min(gpus, 1)
        gpus_of_ranks.append(tuple(selected_gpus))
    return free_shares, gpus_of_ranks
