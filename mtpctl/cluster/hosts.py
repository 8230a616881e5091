"""Free capacity of hosts: their CPUs and the free share of each card, and the allocation of ranks from it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Host:
    """CPUs and GPUs of one machine, and its name if known. The fractional part of `gpus` is the free share of one card."""

    cpus: float
    gpus: float = 0
    name: str = ""


Capacity = tuple[float, list[float]]
"""Free CPUs of a host, and the free share of each of its cards."""

Allocation = tuple[int, list[tuple[int, ...]]]
"""The index of a host, and for each rank the indices of its cards there."""


def capacities(hosts: Iterable[Host], most: float = math.inf) -> list[Capacity]:
    """The capacity of each host, with at most `most` cards."""
    return [(host.cpus, _cards(min(host.gpus, most))) for host in hosts]


def _cards(gpus: float) -> list[float]:
    gpus = round(gpus, 4)  # Ray's resolution
    whole = int(gpus)
    return [1.0] * whole + ([gpus - whole] if gpus > whole else [])


def allocate(free: list[Capacity], ranks: int, cpus: float, gpus: float) -> Allocation | None:
    """Allocate CPUs and cards for all ranks on the first host with capacity, and subtract them from `free`. None if there is none."""
    for host, (spare, cards) in enumerate(free):
        left = allocate_cards(cards, ranks, gpus)
        if spare + 1e-9 >= ranks * cpus and left is not None:
            free[host] = (spare - ranks * cpus, left[0])
            return host, left[1]
    return None


def allocate_cards(cards: list[float], ranks: int, gpus: float) -> tuple[list[float], list[tuple[int, ...]]] | None:
    """Allocate `gpus` to each rank. Returns the remaining free shares of the cards and the cards of each rank; None if they do not suffice.

    Cards are selected as in Ray: a share is taken from the card with the smallest sufficient free share.
    """
    left, taken = list(cards), []
    for _ in range(ranks):
        fitting = [card for card, free in enumerate(left) if free + 1e-9 >= min(gpus, 1)]
        chosen = sorted(fitting, key=left.__getitem__)[: math.ceil(gpus)]
        if len(chosen) < gpus:
            return None
        for card in chosen:
            left[card] -= min(gpus, 1)
        taken.append(tuple(chosen))
    return left, taken
