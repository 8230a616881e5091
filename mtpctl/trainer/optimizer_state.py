"""An optimizer's state of each parameter, in the parameter's own shape, however it is sharded over ranks.

megatron-core's own optimizer checkpoints number parameter groups rank by rank, so that another pipeline layout cannot load them. Here the
moments (and, for bf16, the fp32 master) are named after their parameter, and hyperparameters come from the recipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from mtpctl.trainer.offload import release

MOMENTS = ("exp_avg", "exp_avg_sq")
TRUNK, MTP = "trunk", "mtp"


@dataclass
class Slot:
    """One parameter's moments and master: a tensor for each of `kinds`.

    Each has the shape of this rank's parameter. With the distributed optimizer each is this dp rank's flat shard, elements `start` to
    `end`; `group` then has the ranks with the other shards. A rank without a shard of this parameter has no tensors.
    """

    parameter: Tensor
    tensors: dict[str, Tensor]
    kinds: tuple[str, ...]
    start: int = 0
    end: int = 0
    group: dist.ProcessGroup | None = None

    def whole(self, kind: str) -> Tensor:
        """In the parameter's shape, fp32. With the distributed optimizer every rank of the group must call this."""
        if self.group is None:
            return self.tensors[kind]
        flat = torch.zeros(self.parameter.numel(), dtype=torch.float32, device=self.parameter.device)
        if self.tensors:
            flat[self.start : self.end] = self.tensors[kind]
        dist.all_reduce(flat, group=self.group)
        return flat.view(self.parameter.shape)

    def fill(self, kind: str, value: Tensor) -> None:
        """Copy this rank's shard of `value`, which has the parameter's shape."""
        if not self.tensors:
            return
        target = self.tensors[kind]
        source = value if self.group is None else value.flatten()[self.start : self.end]
        if source.data_ptr() != target.data_ptr():
            target.copy_(source.view(target.shape))


def slots(model: torch.nn.Module, optimizer: ChainedOptimizer) -> Iterator[Slot]:
    """The slots of every parameter of `model` that the optimizer updates, in the same order on all ranks of a dp group."""
    owners: dict[int, Tensor] = {id(getattr(p, "main_param", p)): p for p in model.parameters()}
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        init_moments(part.optimizer)
        yield from _sharded(part) if isinstance(part, DistributedOptimizer) else _plain(part, owners)


def init_moments(adam: torch.optim.Optimizer, *, offloaded: bool = False) -> None:
    """Make zero moments where Adam has taken no step yet, as it would itself. `offloaded`: without memory, which `HostMemory` holds."""
    assert isinstance(adam, torch.optim.Adam), f"the slots of {type(adam).__name__} are not known"
    for group in adam.param_groups:
        for parameter in group["params"]:
            state: dict[str, Tensor] = adam.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                for kind in MOMENTS:
                    state[kind] = torch.zeros_like(parameter)
                    if offloaded:
                        release([state[kind]])


def group_of(parameter: Tensor) -> str:
    """The group of a parameter, or of its master or shard: `mtp` or `trunk`."""
    return getattr(parameter, "grad_norm_group", None) or TRUNK


def set_steps(optimizer: ChainedOptimizer, steps: Mapping[str, int]) -> None:
    """Set the number of steps that the moments of each group's parameters come from."""
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer:
            for parameter, state in part.optimizer.state.items():
                state["step"].fill_(steps[group_of(parameter)])


def _kinds(parameter: Tensor) -> tuple[str, ...]:
    return MOMENTS if parameter.dtype == torch.float32 else (*MOMENTS, "master")


def _plain(part: MegatronOptimizer, owners: dict[int, Tensor]) -> Iterator[Slot]:
    for master in [p for group in part.optimizer.param_groups for p in group["params"]]:
        parameter = owners[id(master)]
        state = part.optimizer.state[master]
        kinds = _kinds(parameter)
        yield Slot(parameter, {kind: master.detach() if kind == "master" else state[kind] for kind in kinds}, kinds)


def _sharded(part: DistributedOptimizer) -> Iterator[Slot]:
    buckets = [bucket for by_dtype in part.gbuf_ranges for group in by_dtype.values() for bucket in group]
    ranges = {parameter: place["param"] for bucket in buckets for parameter, place in bucket["param_map"].items()}
    for buffer in part.buffers:
        for parameter in buffer.params:
            kinds = _kinds(parameter)
            place = ranges.get(parameter)
            if place is None:
                yield Slot(parameter, {}, kinds, group=part.data_parallel_group)
                continue
            found = part._get_main_param_and_optimizer_states(parameter)
            tensors = {kind: found["param" if kind == "master" else kind].detach() for kind in kinds}
            yield Slot(parameter, tensors, kinds, place.start, place.end, part.data_parallel_group)
