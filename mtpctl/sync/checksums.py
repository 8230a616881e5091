"""One checksum for both ends of a weight transfer, on CPU and GPU alike, and for tensors that lie in parts on several ranks.

A tensor's elements are read as integers `w_0 … w_{n-1}` of their own width, and two sums are kept modulo 2^64:
`n + sum w_i` and `n + sum (i + 1) w_i` (Fletcher's checksum without its reduction). Changed bits alter the first sum, swapped
elements the second; no byte leaves the device. Both are sums over elements, so ranks that hold parts of a tensor each add up
their own, and the parts add up to the whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch

_WIDTHS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 22}
"""Elements at a time; on a card two tensors of int64 of that size, 64 MiB together, are all the memory it takes."""
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Part:
    """Columns `[start, stop)` of every row of a tensor seen as a matrix of `columns` columns and `numel` elements, summed."""

    numel: int
    columns: int
    start: int
    stop: int
    plain: int
    weighted: int


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> str:
    """32 hex digits that depend on the tensor's bytes, their order, and its element count.

    Raises ValueError for an element width that is not 1, 2, 4 or 8 bytes.
    """
    numel = tensor.numel()
    return combined([summed(tensor.detach().reshape(1, -1), numel, numel, 0)])


@torch.no_grad()
def summed(block: torch.Tensor, numel: int, columns: int, start: int) -> Part:
    """The sums of `block [rows, width]`, columns `[start, start + width)` of a matrix of `columns` columns and `numel` elements."""
    if block.element_size() not in _WIDTHS:
        raise ValueError(f"no checksum for dtype {block.dtype}")
    words, (rows, width) = block.view(_WIDTHS[block.element_size()]), block.shape
    chunk = _CHUNK.get(block.device.type, _CHUNK["cpu"])
    wide, high = min(width, chunk), max(1, chunk // max(width, 1))
    places = _ramp(wide, block.device)
    plains, weights, shifts = [], [], []
    for left in range(0, width, max(wide, 1)):
        for top in range(0, rows, high):
            part = words[top : top + high, left : left + wide]
            if part.device.type == "cpu":
                # A card widens elements on the way; here each sum would widen them once more.
                part = part.to(torch.int64)
            # An element's place: how far from the part's first column, plus where that lies, which is one number for a row.
            placed = (part * places[: part.shape[1]]).sum()
            if part.shape[0] > 1:
                placed = placed + (part.sum(1) * torch.arange(part.shape[0], device=block.device)).sum() * columns
            plains.append(part.sum())
            weights.append(placed)
            shifts.append(start + left + top * columns)
    found = torch.stack([*plains, *weights]).tolist() if shifts else []
    plain, weighted = found[: len(shifts)], found[len(shifts) :]
    total = sum(weighted) + sum(value * shift for value, shift in zip(plain, shifts, strict=True))
    return Part(numel, columns, start, start + width, sum(plain) & _MASK, total & _MASK)


def _ramp(width: int, device: torch.device) -> torch.Tensor:
    """1, 2, … `width`. A CPU's is made once: that takes as long as all else about a small tensor."""
    return torch.arange(1, width + 1, device=device) if device.type != "cpu" else _cpu_ramp()[:width]


@lru_cache(maxsize=1)
def _cpu_ramp() -> torch.Tensor:
    return torch.arange(1, _CHUNK["cpu"] + 1)


def combined(parts: Iterable[Part]) -> str:
    """The checksum of the tensor that these parts make up. A part may come more than once, where ranks hold the same.

    What does not add up to a tensor gives a text that says why, and that no checksum equals.
    """
    found: dict[tuple[int, int], Part] = {}
    for part in parts:
        if found.setdefault((part.start, part.stop), part) != part:
            return "ranks that hold the same part differ in it"
    if not found:
        return "no rank holds it"
    first = next(iter(found.values()))
    end = 0
    for start, stop in sorted(found):
        if start != end:
            return f"columns {end} to {start} of {first.columns} are held by no rank"
        end = stop
    if end != first.columns:
        return f"columns {end} to {first.columns} are held by no rank"
    plain = (first.numel + sum(part.plain for part in found.values())) & _MASK
    weighted = (first.numel + sum(part.weighted for part in found.values())) & _MASK
    return f"{plain:016x}{weighted:016x}"
