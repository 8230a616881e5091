"""Measurements that a weight sync is compared with: memory in use on a card, and the copy rate of host memory."""

from __future__ import annotations

import time

import torch


def card_memory(*, reset: bool = False) -> dict[str, int]:
    """Bytes on this process's card; zeros without a card.

    `allocated` by tensors, with its `peak` since the last `reset`; `reserved` by torch's allocator, with its `peak_reserved`; `used` by
    all processes on the card, including CUDA and NCCL.
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
    """Rate at which host memory is copied, in GB/s: the best of five."""
    source, destination = torch.ones(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        destination.copy_(source)
        best = min(best, time.perf_counter() - began)
    return nbytes / best / 1e9
