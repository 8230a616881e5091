"""`telemetry.profile`: where one update's time goes, as a trace for a viewer and as two tables to read.

The third update of each stage is profiled on every rank: by then shapes, caches and the allocator have settled. Phases are
the ranges that the engine and the trainer name themselves (`mtpctl/…`); they nest, so their times do not add up. On a card
a phase's device time is that of the kernels launched within it, on a CPU both columns are the same clock's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.autograd.profiler_util import EventList

PROFILED_UPDATE = 3
PREFIX = "mtpctl/"
MOST_OPERATIONS = 20


class UpdateProfile:
    """Counts a rank's updates, stage by stage, and profiles one of each.

    Writes `profile-STAGE-rankN.json.gz` (Chrome trace) and `profile-STAGE-rankN.txt` to `folder`.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._seen: dict[str, int] = {}

    @contextmanager
    def update(self, stage: str) -> Iterator[None]:
        """Around one update of `stage`."""
        self._seen[stage] = self._seen.get(stage, 0) + 1
        if self._seen[stage] != PROFILED_UPDATE:
            yield
            return
        import torch

        cuda = torch.cuda.is_available()
        activities = [torch.profiler.ProfilerActivity.CPU] + ([torch.profiler.ProfilerActivity.CUDA] if cuda else [])
        with torch.profiler.profile(activities=activities) as profile:
            yield
            if cuda:
                torch.cuda.synchronize()
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"profile-{stage}-rank{self.rank}"
        profile.export_chrome_trace(str(self.folder / f"{name}.json.gz"))
        (self.folder / f"{name}.txt").write_text(tables(profile.key_averages(), cuda=cuda))


def tables(averages: EventList, *, cuda: bool) -> str:
    """Two Markdown tables from a profiler's `key_averages()`: phases by time, and the operations with most time of their own. In ms."""
    whole = "device_time_total" if cuda else "cpu_time_total"
    own = "self_device_time_total" if cuda else "self_cpu_time_total"
    phases = sorted((e for e in averages if e.key.startswith(PREFIX)), key=lambda e: -e.cpu_time_total)
    lines = ["| phase | times | host ms | device ms |", "|---|---|---|---|"]
    lines += [
        f"| {e.key.removeprefix(PREFIX)} | {e.count} | {e.cpu_time_total / 1000:.2f} | {getattr(e, whole) / 1000:.2f} |" for e in phases
    ]
    operations = sorted((e for e in averages if not e.key.startswith(PREFIX)), key=lambda e: -getattr(e, own))
    total = sum(getattr(e, own) for e in operations) or 1.0
    lines += ["", f"| operation | times | {'device' if cuda else 'host'} ms of its own | share |", "|---|---|---|---|"]
    lines += [
        f"| {e.key[:90]} | {e.count} | {getattr(e, own) / 1000:.2f} | {getattr(e, own) / total:.1%} |" for e in operations[:MOST_OPERATIONS]
    ]
    return "\n".join(lines) + "\n"
