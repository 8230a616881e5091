"""Admission: how far generation may run ahead of the weights."""

import pytest

from mtpctl.controller.staleness import Admission


def let_out(admission: Admission) -> int:
    count = 0
    while admission.open:
        admission.admit()
        count += 1
    return count


@pytest.mark.parametrize(("threshold", "expected"), [(0.0, 8), (0.5, 12), (1.0, 16)])
def test_at_most_one_plus_threshold_times_what_the_updates_until_the_next_sync_need(threshold: float, expected: int) -> None:
    assert let_out(Admission(groups_per_step=4, sync_every=2, threshold=threshold)) == expected


def test_groups_still_pending_at_a_sync_count_against_the_next_interval() -> None:
    admission = Admission(groups_per_step=8, sync_every=1, threshold=0.5)
    let_out(admission)
    admission.synced(pending=4)
    assert let_out(admission) == 8


def test_a_dropped_group_makes_room_for_its_replacement() -> None:
    admission = Admission(groups_per_step=2, sync_every=1, threshold=0.0)
    let_out(admission)
    admission.drop()
    assert let_out(admission) == 1


def test_without_staleness_every_group_after_a_sync_is_of_the_new_weights() -> None:
    admission = Admission(groups_per_step=3, sync_every=1, threshold=0.0)
    for _ in range(4):
        assert let_out(admission) == 3
        admission.synced(pending=0)
