"""The plan of collectives: which collectives a rank runs in a block, in order, as text that can be compared across ranks.

Ranks of a process group must run the same collectives on it in the same order; otherwise they wait for each other until a deadline. The
plan is recorded from torch's dispatcher, so it includes those of Megatron-core and of backward passes. Recording slows all operations down.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Collective:
    """One call: the operation, the name and ranks of its process group, and the dtypes and shapes of its tensors."""

    operation: str
    group: str
    ranks: tuple[int, ...]
    tensors: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.group} {list(self.ranks)}: {self.operation} {' '.join(self.tensors)}"


class CollectivePlan(TorchDispatchMode):
    """Records the collectives of this rank in a `with` block. As text it has a line per collective, to compare with the other ranks'."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func.namespace == "c10d" and (group := next(filter(None, map(_group_of, args)), None)) is not None:
            ranks = tuple(dist.get_process_group_ranks(group))
            tensors = tuple(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in _tensors_in(args))
            self.collectives.append(Collective(func.__name__.partition(".")[0], group.group_desc, ranks, tensors))
        return func(*args, **(kwargs or {}))

    def __str__(self) -> str:
        return "".join(f"{collective}\n" for collective in self.collectives)


def _group_of(argument: object) -> dist.ProcessGroup | None:
    if not isinstance(argument, torch.ScriptObject):
        return None
    try:
        return dist.ProcessGroup.unbox(argument)
    except RuntimeError:  # Another object, such as a reduction.
        return None


def _tensors_in(arguments: Iterable[object]) -> Iterator[torch.Tensor]:
    for each in arguments:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from _tensors_in(each)
