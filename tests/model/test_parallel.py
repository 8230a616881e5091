"""Process groups of one rank."""

from __future__ import annotations

import weakref

import torch.distributed as dist
from megatron.core import parallel_state

from mtpctl.model.parallel import ProcessGroups, Rank
from mtpctl.recipe.section import ParallelConfig


def test_closed_groups_are_freed() -> None:
    """A process forked later would wait for their threads, which it does not have."""
    with ProcessGroups(Rank(), ParallelConfig()):
        group = weakref.ref(parallel_state.get_data_parallel_group(with_context_parallel=True))
        assert group() is not None
    assert not [name for name, value in vars(parallel_state).items() if isinstance(value, dist.ProcessGroup)]
    assert group() is None
