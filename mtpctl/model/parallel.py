"""Process groups of one trainer or log-prob rank, on gloo or NCCL."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from torch import Tensor

from mtpctl.cluster.rendezvous import join_store
from mtpctl.compat import cpu_device
from mtpctl.errors import ClusterResources
from mtpctl.plan.sharding import expert_tp
from mtpctl.recipe.section import ParallelConfig


@dataclass(frozen=True)
class Rank:
    """A rank of the world group. master: `host:port` of the rendezvous store, which rank 0 hosts unless world_size is 1."""

    rank: int = 0
    world_size: int = 1
    master: str = ""
    local_rank: int = 0
    deadline_s: float = 600.0


class ProcessGroups:
    """All process groups of a rank, from construction until `close`. A process has at most one such object at a time."""

    def __init__(self, rank: Rank, parallel: ParallelConfig) -> None:
        """Join the world group and create the groups of tp, pp, cp, ep and dp.

        Raises RuntimeError if the number of ranks does not match the layout, or if the process already has groups.
        """
        if rank.world_size != parallel.world_size:
            raise RuntimeError(f"{rank.world_size} ranks were started for a layout of {parallel.world_size} ranks")
        if dist.is_initialized():
            raise RuntimeError("this process already has process groups; close their owner first")
        cpu_device.install()
        try:
            _join(rank)
            with cpu_device.share_single_rank_groups():
                parallel_state.initialize_model_parallel(
                    tensor_model_parallel_size=parallel.tp,
                    pipeline_model_parallel_size=parallel.pp,
                    context_parallel_size=parallel.cp,
                    expert_model_parallel_size=parallel.ep,
                    expert_tensor_parallel_size=expert_tp(parallel),
                )
            # There is no dropout, so tensor-parallel ranks need no separate random states.
            initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Destroy the groups and their threads. Idempotent."""
        parallel_state.destroy_model_parallel()
        # megatron-core keeps references to these two groups, and so their threads. A forked process has no such threads and would wait for
        # them.
        parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None
        parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO = None
        if dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _join(rank: Rank) -> None:
    """Create the world group. Raises ClusterResources if the host lacks the rank's GPU."""
    cuda = torch.cuda.is_available()
    if cuda and rank.local_rank >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ClusterResources(f"train.parallel: rank {rank.rank} needs GPU {rank.local_rank} of a host with {count} GPUs; use fewer ranks")
    if cuda:
        torch.cuda.set_device(rank.local_rank)
    store: dist.Store = dist.HashStore() if rank.world_size == 1 else join_store(rank.master, rank.deadline_s)
    # megatron-core and its checkpoints read these.
    os.environ |= {"RANK": str(rank.rank), "WORLD_SIZE": str(rank.world_size), "LOCAL_RANK": str(rank.local_rank)}
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=store,
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=datetime.timedelta(seconds=rank.deadline_s),
    )
    if cuda:
        # NCCL allocates memory at a group's first collective. With a single rank that would happen at the first checkpoint, when engines
        # may have filled the GPU.
        dist.all_reduce(torch.zeros(1, device="cuda"))


def reduce_sums(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sum the last pipeline stage's metric sums over dp and return them on every stage. Collective."""
    if dist.get_world_size() == 1:
        return sums
    names = sorted(sums)
    if names:
        stacked = torch.stack([sums[name].float() for name in names])
        dist.all_reduce(stacked, group=parallel_state.get_data_parallel_group())
        sums = dict(zip(names, stacked, strict=True))
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        values = [{name: value.item() for name, value in sums.items()}]
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(values, src=last, group=parallel_state.get_pipeline_model_parallel_group())
        sums = {name: torch.tensor(value) for name, value in values[0].items()}
    return sums


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Sums over the data-parallel ranks, exact for integers below 2^53. Collective; all ranks pass equally many values."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(values)
    stacked = torch.tensor(values, dtype=torch.float64, device=torch.cuda.current_device())
    dist.all_reduce(stacked, group=parallel_state.get_data_parallel_group())
    return stacked.tolist()


def max_over_ranks(value: int) -> int:
    """The maximum over all ranks. Collective."""
    if dist.get_world_size() == 1:
        return value
    maximum = torch.tensor(value, device=torch.cuda.current_device())
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX)
    return int(maximum)
