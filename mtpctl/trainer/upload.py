"""Arrays of the host, brought to a device together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNED = 16
"""Each array begins at a multiple of so many bytes, more than any kernel asks for."""


def uploaded(arrays: Sequence[np.ndarray], device: torch.device | str) -> list[Tensor]:
    """Arrays that nobody else holds as tensors on the device, of the same shapes and dtypes, in the order given.

    To a card they go in one copy: each one takes the host longer than the bytes of a micro-batch take to travel.
    """
    if torch.device(device).type == "cpu":
        return [torch.from_numpy(each) for each in arrays]
    return in_one_copy(arrays, device)


def in_one_copy(arrays: Sequence[np.ndarray], device: torch.device | str) -> list[Tensor]:
    """`uploaded`, by one copy to any device. The tensors share one storage."""
    starts, size = [], 0
    for each in arrays:
        starts.append(size)
        size += -(-each.nbytes // ALIGNED) * ALIGNED
    # From pinned memory, so that the host does not wait until the card comes to the copy.
    together = torch.empty(size, dtype=torch.uint8, pin_memory=torch.device(device).type == "cuda")
    here = together.numpy()
    for start, each in zip(starts, arrays, strict=True):
        here[start : start + each.nbytes] = np.ascontiguousarray(each).reshape(-1).view(np.uint8)
    there = together.to(device, non_blocking=True)
    return [
        there[start : start + each.nbytes].view(torch.from_numpy(each).dtype).view(each.shape)
        for start, each in zip(starts, arrays, strict=True)
    ]
