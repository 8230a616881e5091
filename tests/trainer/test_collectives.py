"""The plans of collectives of an update agree on all ranks of each process group, and include those of its backward pass."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpctl.model.parallel import Rank
from mtpctl.recipe.parallel import ParallelConfig
from mtpctl.trainer.collectives import Collective, CollectivePlan
from mtpctl.trainer.objective import NextToken
from tests.fakes.forked import run_ranks
from tests.fakes.tiny import GENTLE, engine, mimo, sequences

Plan = list[Collective]


def plans_of(root: Path, parallel: ParallelConfig) -> list[Plan]:
    """The plan of one update, by rank."""
    mimo(root / "model")

    def update(rank: Rank) -> Any:
        folder = mimo(root / f"model-{rank.rank}")
        with engine(folder, rank=rank, parallel=parallel) as trainer:
            trainer.set_optimizer(GENTLE)
            with CollectivePlan() as plan:
                trainer.update(sequences(), NextToken())
            assert str(plan).count("\n") == len(plan.collectives)
            return plan.collectives

    answers, error = run_ranks(parallel.world_size, update, 120)
    assert not error, error
    return answers


def group_plans(plans: list[Plan]) -> dict[tuple[int, ...], list[Plan]]:
    """For each set of ranks, the collectives of each of its ranks on their common groups, without transfers between pipeline stages."""
    by_ranks: dict[tuple[int, ...], list[Plan]] = {}
    for ranks in {each.ranks for plan in plans for each in plan}:
        own = [[each for each in plans[rank] if each.ranks == ranks and each.operation not in ("send", "recv_")] for rank in ranks]
        by_ranks[ranks] = own
    return by_ranks


@pytest.mark.parametrize(
    "layout", [{"tp": 2, "sequence_parallel": True}, {"cp": 2}, {"pp": 2}, {"dp": 2}], ids=lambda layout: next(iter(layout))
)
def test_ranks_of_a_group_run_equal_collectives_in_equal_order(tmp_path: Path, layout: dict[str, Any]) -> None:
    plans = plans_of(tmp_path, ParallelConfig(**layout))
    shared = {ranks: own for ranks, own in group_plans(plans).items() if len(ranks) > 1}
    assert shared and all(one == other for own in shared.values() for one, other in pairwise(own))
    assert sum(map(len, shared[0, 1])) > 0


def test_plan_records_collectives_of_a_backward_pass() -> None:
    def reduce(rank: Rank) -> Any:
        from mtpctl.cluster.rendezvous import join_store

        torch.set_num_threads(1)
        store = join_store(rank.master, rank.deadline_s)
        torch.distributed.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.world_size)
        x = torch.ones(3, requires_grad=True)
        x.register_hook(lambda grad: (torch.distributed.all_reduce(grad), grad)[1])
        with CollectivePlan() as plan:
            (2 * x).sum().backward()
        torch.distributed.destroy_process_group()
        return str(plan)

    answers, error = run_ranks(2, reduce, 60)
    assert not error, error
    assert answers == ["default_pg [0, 1]: allreduce_ float32[3]\n"] * 2
