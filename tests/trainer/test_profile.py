"""One update of each stage is profiled, and its traces of collectives agree on all ranks of each process group."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import record_function

from mtpctl.trainer.profile import PROFILED_UPDATE, Collective, UpdateProfile
from tests.fakes.collective_ranks import LAYOUTS, traces_of_all

Trace = list[Collective]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return traces_of_all(tmp_path_factory.mktemp("traces"))


def shared_traces(by_rank: list[Trace]) -> list[list[Trace]]:
    """For each set of several ranks, the collectives of each of its ranks on their groups, without transfers between pipeline stages."""
    groups = {each.ranks for trace in by_rank for each in trace if len(each.ranks) > 1}
    return [
        [[each for each in by_rank[rank] if each.ranks == ranks and each.operation not in ("send", "recv_")] for rank in ranks]
        for ranks in groups
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_of_a_group_run_equal_collectives_in_equal_order(traces: dict[str, Any], layout: str) -> None:
    assert not isinstance(traces[layout], str), traces[layout]
    shared = shared_traces(traces[layout])
    assert sum(len(trace) for by_rank in shared for trace in by_rank) > 0
    assert all(one == other for by_rank in shared for one, other in pairwise(by_rank))


def test_trace_records_collectives_of_a_backward_pass(traces: dict[str, Any]) -> None:
    assert traces["backward"] == ["default_pg [0, 1]: allreduce_ float32[3]\n"] * 2


def test_third_update_of_a_stage_is_profiled(tmp_path: Path) -> None:
    profile = UpdateProfile(tmp_path / "logs", rank=1)
    for update in range(1, PROFILED_UPDATE + 2):
        with profile.update("rl"), record_function("mtpctl/products"):
            torch.ones(64, 64) @ torch.ones(64, 64)
        assert (tmp_path / "logs").exists() == (update >= PROFILED_UPDATE)
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["profile-rl-rank1.json.gz", "profile-rl-rank1.txt"]
    trace = json.loads(gzip.decompress((tmp_path / "logs/profile-rl-rank1.json.gz").read_bytes()))
    assert any(event.get("name") == "mtpctl/products" for event in trace["traceEvents"])
    phases, operations = (tmp_path / "logs/profile-rl-rank1.txt").read_text().split("\n\n")
    assert "| products | 1 |" in phases and "aten::mm" in operations and "mtpctl/" not in operations
