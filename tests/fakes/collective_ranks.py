"""Records the collectives of an update under several layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mtpctl.cluster.rendezvous import join_store
from mtpctl.model.parallel import Rank
from mtpctl.recipe.section import ParallelConfig
from mtpctl.trainer.objective import NextToken
from mtpctl.trainer.profile import CollectivePlan
from tests.fakes.forked import run_ranks
from tests.fakes.tiny import GENTLE, engine, mimo, sequences

LAYOUTS = {
    "tp": ParallelConfig(tp=2, sequence_parallel=True),
    "cp": ParallelConfig(cp=2),
    "pp": ParallelConfig(pp=2),
    "dp": ParallelConfig(dp=2),
}


def update_plans(root: Path, parallel: ParallelConfig) -> Any:
    """The plan of one update, by rank; or the error of a rank."""

    def update(rank: Rank) -> Any:
        with engine(mimo(root / f"model-{rank.rank}"), rank=rank, parallel=parallel) as trainer:
            trainer.set_optimizer(GENTLE)
            with CollectivePlan() as plan:
                trainer.update(sequences(), NextToken())
            return plan.collectives

    plans, error = run_ranks(parallel.world_size, update, 120)
    return error or plans


def backward_plans() -> Any:
    """The plan of a backward pass with an all-reduce, by rank, as text."""

    def reduce(rank: Rank) -> Any:
        store = join_store(rank.master, rank.deadline_s)
        torch.distributed.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.world_size)
        x = torch.ones(3, requires_grad=True)
        x.register_hook(lambda grad: (torch.distributed.all_reduce(grad), grad)[1])
        with CollectivePlan() as plan:
            (2 * x).sum().backward()
        torch.distributed.destroy_process_group()
        return str(plan)

    plans, error = run_ranks(2, reduce, 60)
    return error or plans


def plans_of_all(root: Path) -> dict[str, Any]:
    """By layout, the plan of each rank; and those of a backward pass."""
    return {name: update_plans(root / name, parallel) for name, parallel in LAYOUTS.items()} | {"backward": backward_plans()}
