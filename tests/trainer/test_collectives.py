"""The plans of collectives of an update agree on all ranks of each process group, and include those of its backward pass."""

from __future__ import annotations

import pickle
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mtpctl.trainer.collectives import Collective
from tests.fakes.collective_ranks import LAYOUTS

Plan = list[Collective]


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By layout, the plan of each rank."""
    file = tmp_path_factory.mktemp("plans") / "plans"
    subprocess.run([sys.executable, "-W", "ignore", "-m", "tests.fakes.collective_ranks", str(file)], timeout=280, check=True)
    results: dict[str, Any] = pickle.loads(Path(file).read_bytes())
    return results


def shared_plans(by_rank: list[Plan]) -> list[list[Plan]]:
    """For each set of several ranks, the collectives of each of its ranks on their groups, without transfers between pipeline stages."""
    groups = {each.ranks for plan in by_rank for each in plan if len(each.ranks) > 1}
    return [
        [[each for each in by_rank[rank] if each.ranks == ranks and each.operation not in ("send", "recv_")] for rank in ranks]
        for ranks in groups
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_of_a_group_run_equal_collectives_in_equal_order(plans: dict[str, Any], layout: str) -> None:
    assert not isinstance(plans[layout], str), plans[layout]
    shared = shared_plans(plans[layout])
    assert sum(len(plan) for by_rank in shared for plan in by_rank) > 0
    assert all(one == other for by_rank in shared for one, other in pairwise(by_rank))


def test_plan_records_collectives_of_a_backward_pass(plans: dict[str, Any]) -> None:
    assert plans["backward"] == ["default_pg [0, 1]: allreduce_ float32[3]\n"] * 2
