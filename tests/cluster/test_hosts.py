"""Capacity of hosts is allocated in the order in which Ray allocates it."""

from __future__ import annotations

from mtpctl.cluster.hosts import Host, allocate, allocate_gpus, list_capacities


def test_share_is_placed_on_the_fullest_gpu_with_enough_room() -> None:
    assert allocate_gpus([1.0, 0.5, 0.75], 1, 0.5) == ([1.0, 0.0, 0.75], [(1,)])
    assert allocate_gpus([1.0, 0.25], 2, 0.5) == ([0.0, 0.25], [(0,), (0,)])
    assert allocate_gpus([0.5, 0.5], 1, 1.0) is None, "half a GPU twice is no GPU"
    assert allocate_gpus([1.0, 1.0, 1.0], 1, 2) == ([0.0, 0.0, 1.0], [(0, 1)])


def test_the_free_fraction_of_a_gpu_is_offered_as_a_share() -> None:
    assert list_capacities([Host(4, 2.25)]) == [(4, [1.0, 1.0, 0.25])]
    assert list_capacities([Host(4, 2.9999999)]) == [(4, [1.0, 1.0, 1.0])], "as finely as Ray counts"


def test_first_host_with_capacity_for_all_ranks_is_selected() -> None:
    free = list_capacities([Host(8, 1), Host(1, 4), Host(8, 4)])
    assert allocate(free, 2, 1, 1) == (2, [(0,), (1,)])
    assert free[2] == (6, [0.0, 0.0, 1.0, 1.0])
    assert allocate(free, 5, 1, 1) is None
