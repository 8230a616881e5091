"""Memory in use on a process's card, and how fast this machine copies memory: what measurements of a sync compare with."""

from __future__ import annotations

import time

import torch


def card_memory(*, reset: bool = False) -> dict[str, int]:
    """Bytes on this process's card; zeros without one.

    `allocated` by tensors now, `peak` at most since the last `reset`; `reserved` by torch's allocator, which keeps what tensors
    leave, and `peak_reserved` likewise; `used` by all processes of the card, with what CUDA and NCCL hold.
    """
    if not torch.cuda.is_available():
        return dict.fromkeys(("allocated", "peak", "reserved", "peak_reserved", "used"), 0)
    if reset:
        torch.cuda.reset_peak_memory_stats()
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": torch.cuda.memory_allocated(),
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "used": total - free,
    }


def copy_rate(nbytes: int) -> float:
    """GB/s at which this machine's memory is copied, the best of five."""
    source, goal = torch.ones(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        goal.copy_(source)
        best = min(best, time.perf_counter() - began)
    return nbytes / best / 1e9
