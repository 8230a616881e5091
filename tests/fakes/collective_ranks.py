"""Records the collectives of an update under several layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mtpctl.cluster.rendezvous import join_store
from mtpctl.model.parallel import Rank
from mtpctl.recipe.section import ParallelConfig
from mtpctl.trainer.objective import NextToken
from mtpctl.trainer.profile import CollectiveTrace
from tests.fakes.forked import run_ranks
from tests.fakes.tiny import GENTLE, engine, mimo, sequences

LAYOUTS = {
    "tp": ParallelConfig(tp=2, sequence_parallel=True),
    "cp": ParallelConfig(cp=2),
    "pp": ParallelConfig(pp=2),
    "dp": ParallelConfig(dp=2),
}


def update_traces(root: Path, parallel: ParallelConfig) -> Any:
    """The trace of one update, by rank; or the error of a rank."""

    def update(rank: Rank) -> Any:
        with engine(mimo(root / f"model-{rank.rank}"), rank=rank, parallel=parallel) as trainer:
            trainer.set_optimizer(GENTLE)
            with CollectiveTrace() as trace:
                trainer.update(sequences(), NextToken())
            return trace.collectives

    traces, error = run_ranks(parallel.world_size, update, 120)
    return error or traces


def backward_traces() -> Any:
    """The trace of a backward pass with an all-reduce, by rank, as text."""

    def reduce(rank: Rank) -> Any:
        store = join_store(rank.master, rank.deadline_s)
        torch.distributed.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.world_size)
        x = torch.ones(3, requires_grad=True)
        x.register_hook(lambda grad: (torch.distributed.all_reduce(grad), grad)[1])
        with CollectiveTrace() as trace:
            (2 * x).sum().backward()
        torch.distributed.destroy_process_group()
        return str(trace)

    traces, error = run_ranks(2, reduce, 60)
    return error or traces


def traces_of_all(root: Path) -> dict[str, Any]:
    """By layout, the trace of each rank; and those of a backward pass."""
    return {name: update_traces(root / name, parallel) for name, parallel in LAYOUTS.items()} | {"backward": backward_traces()}
