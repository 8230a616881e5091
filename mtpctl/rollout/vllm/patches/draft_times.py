"""How long a step's drafting takes, in a process that runs vLLM's drafter.

On a card a pair of events in the stream around the drafter says so, idle gaps between its kernels included; they are read only when
somebody asks, and only those that have passed by then, so no step waits for another.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial

import torch

KEPT = 256
"""Steps remembered for each number of drafts."""


class DraftTimes:
    """Seconds of drafting by the number of drafts, since they were last taken."""

    def __init__(self) -> None:
        self._kept: dict[int, deque[Callable[[], float | None]]] = defaultdict(partial(deque, maxlen=KEPT))

    def begin(self, drafts: int, device: torch.device) -> Callable[[], None]:
        """Call where drafting begins, and what is returned where it ends."""
        if device.type == "cuda":
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()

            def end() -> None:
                last.record()
                self._kept[drafts].append(lambda: first.elapsed_time(last) / 1e3 if last.query() else None)

        else:
            began = time.perf_counter()

            def end() -> None:
                took = time.perf_counter() - began
                self._kept[drafts].append(lambda: took)

        return end

    def take(self) -> dict[int, float]:
        """The median by the number of drafts; what was seen is forgotten."""
        seen = {drafts: [seconds for read in kept if (seconds := read()) is not None] for drafts, kept in self._kept.items()}
        self._kept.clear()
        return {drafts: statistics.median(each) for drafts, each in seen.items() if each}


TIMES = DraftTimes()
"""Of the drafter in this process, of which there is one."""
