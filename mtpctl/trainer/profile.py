"""`telemetry.profile`: in each stage, timings of one update, and a trace of the collectives of another.

Ranks of a process group must run the same collectives in the same order; otherwise they wait for each other until a timeout. The trace
lists a rank's collectives in order, as text that can be compared across ranks. It is recorded in torch's dispatcher, so it includes the
collectives of Megatron-core and of backward passes. Recording slows down all operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.profiler_util import EventList
from torch.utils._python_dispatch import TorchDispatchMode

TRACED_UPDATE, PROFILED_UPDATE = 2, 3
"""Numbers of the updates in a stage: the first records collectives, the second timings. Earlier ones compile kernels and fill caches."""
_PHASE = "mtpctl/"
_LISTED_OPERATIONS = 20


class UpdateProfile:
    """Traces the collectives of one update of each stage on this rank, and profiles another.

    Writes `profile-STAGE-rankN.json.gz` (Chrome trace) and `profile-STAGE-rankN.txt` (two tables) to `folder`, and with several ranks
    `collectives-STAGE-rankN.txt` (`CollectiveTrace`). Phases are the profiler ranges named `mtpctl/…`. They nest, so their times do not add
    up. On a GPU, a phase's device time is the time of its kernels.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._updates: dict[str, int] = {}

    @contextmanager
    def update(self, stage: str) -> Iterator[None]:
        count = self._updates[stage] = self._updates.get(stage, 0) + 1
        if count == TRACED_UPDATE and dist.is_initialized() and dist.get_world_size() > 1:
            with CollectiveTrace() as trace:
                yield
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"collectives-{stage}-rank{self.rank}.txt").write_text(str(trace))
            return
        if count != PROFILED_UPDATE:
            yield
            return

        cuda = torch.cuda.is_available()
        activities = [torch.profiler.ProfilerActivity.CPU] + ([torch.profiler.ProfilerActivity.CUDA] if cuda else [])
        with torch.profiler.profile(activities=activities) as profile:
            yield
            if cuda:
                torch.cuda.synchronize()
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"profile-{stage}-rank{self.rank}"
        profile.export_chrome_trace(str(self.folder / f"{name}.json.gz"))
        (self.folder / f"{name}.txt").write_text(_profile_tables(profile.key_averages(), cuda=cuda))


def _profile_tables(averages: EventList, *, cuda: bool) -> str:
    """Two Markdown tables, in ms: phases by host time, and the operations with the most self time."""
    total_time = "device_time_total" if cuda else "cpu_time_total"
    self_time = "self_device_time_total" if cuda else "self_cpu_time_total"
    phases = sorted((e for e in averages if e.key.startswith(_PHASE)), key=lambda e: -e.cpu_time_total)
    lines = ["| phase | calls | host ms | device ms |", "|---|---|---|---|"]
    lines += [
        f"| {e.key.removeprefix(_PHASE)} | {e.count} | {e.cpu_time_total / 1000:.2f} | {getattr(e, total_time) / 1000:.2f} |"
        for e in phases
    ]
    operations = sorted((e for e in averages if not e.key.startswith(_PHASE)), key=lambda e: -getattr(e, self_time))
    total = sum(getattr(e, self_time) for e in operations) or 1.0
    lines += ["", f"| operation | calls | {'device' if cuda else 'host'} self ms | share |", "|---|---|---|---|"]
    lines += [
        f"| {e.key[:90]} | {e.count} | {getattr(e, self_time) / 1000:.2f} | {getattr(e, self_time) / total:.1%} |"
        for e in operations[:_LISTED_OPERATIONS]
    ]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Collective:
    """One call: the operation, the name and ranks of its process group, and the dtypes and shapes of its tensors."""

    operation: str
    group: str
    ranks: tuple[int, ...]
    tensors: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.group} {list(self.ranks)}: {self.operation} {' '.join(self.tensors)}"


class CollectiveTrace(TorchDispatchMode):
    """Records this rank's collectives in a `with` block. `str(trace)` has a line per collective, to compare across ranks."""

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
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _tensors_in(argument)
