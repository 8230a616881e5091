"""A checksum for both ends of a weight transfer. It is equal on CPU and GPU, and does not depend on the sharding over ranks.

The elements are read as integers `w_0 … w_{n-1}` of the same width. The checksum consists of two sums modulo 2^64: `n + sum w_i` and
`n + sum (i + 1) w_i` (Fletcher's checksum without its reduction). Changed bits alter the first sum, swapped elements alter the second. The
sums are computed on the tensor's device. The sums over the shards of a tensor add up to the sums over the tensor; `n` is added once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch

_WIDTHS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 22}
"""Elements per chunk. On a GPU the temporary memory is two int64 tensors of this size, 64 MiB together."""
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class PartialSums:
    """The sums over columns `[start, stop)` of a tensor that is viewed as a matrix with `columns` columns and `numel` elements.

    `plain` and `weighted`: the first and the second sum of the module's docstring, without `n`.
    """

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
    return combine_sums([partial_sums(tensor.detach().reshape(1, -1), numel, numel, 0)])


@torch.no_grad()
def partial_sums(block: torch.Tensor, numel: int, columns: int, start: int) -> PartialSums:
    """Compute the sums of `block [rows, width]`, columns `[start, start + width)` of a matrix of `columns` columns and `numel` elements."""
    if block.element_size() not in _WIDTHS:
        raise ValueError(f"no checksum for dtype {block.dtype}")
    words, (rows, width) = block.view(_WIDTHS[block.element_size()]), block.shape
    chunk_elements = _CHUNK.get(block.device.type, _CHUNK["cpu"])
    chunk_width, chunk_height = min(width, chunk_elements), max(1, chunk_elements // max(width, 1))
    ramp = torch.arange(1, chunk_width + 1, device=block.device) if block.device.type != "cpu" else _cpu_ramp()[:chunk_width]
    plain_sums, weighted_sums, offsets = [], [], []
    for column in range(0, width, max(chunk_width, 1)):
        for row in range(0, rows, chunk_height):
            chunk = words[row : row + chunk_height, column : column + chunk_width]
            if chunk.device.type == "cpu":
                # Convert once. On a CPU, each of the sums below would convert the elements again.
                chunk = chunk.to(torch.int64)
            # The weight of an element is its index in the tensor plus 1: its column in the chunk (from 1, in `ramp`), plus its row in the
            # chunk times `columns`, plus the index of the chunk's first element (in `offsets`).
            weighted_sum = (chunk * ramp[: chunk.shape[1]]).sum()
            if chunk.shape[0] > 1:
                weighted_sum = weighted_sum + (chunk.sum(1) * torch.arange(chunk.shape[0], device=block.device)).sum() * columns
            plain_sums.append(chunk.sum())
            weighted_sums.append(weighted_sum)
            offsets.append(start + column + row * columns)
    sums = torch.stack([*plain_sums, *weighted_sums]).tolist() if offsets else []
    plain, weighted = sums[: len(offsets)], sums[len(offsets) :]
    total = sum(weighted) + sum(chunk_sum * offset for chunk_sum, offset in zip(plain, offsets, strict=True))
    return PartialSums(numel, columns, start, start + width, sum(plain) & _MASK, total & _MASK)


@lru_cache(maxsize=1)
def _cpu_ramp() -> torch.Tensor:
    """1, 2, … up to the chunk size. It is cached because creating it takes as long as the rest of a small tensor's checksum."""
    return torch.arange(1, _CHUNK["cpu"] + 1)


def combine_sums(parts: Iterable[PartialSums]) -> str:
    """Compute the checksum of the tensor that consists of these parts. Replicated parts may be listed several times.

    If the parts are inconsistent or incomplete, returns the reason as text, which never equals a checksum.
    """
    part_by_columns: dict[tuple[int, int], PartialSums] = {}
    for part in parts:
        if part_by_columns.setdefault((part.start, part.stop), part) != part:
            return "ranks differ in the same part"
    if not part_by_columns:
        return "it is on no rank"
    first = next(iter(part_by_columns.values()))
    end = 0
    for start, stop in sorted(part_by_columns):
        if start < end:
            return f"columns {start} to {end} of {first.columns} are in several parts"
        if start != end:
            return f"columns {end} to {start} of {first.columns} are on no rank"
        end = stop
    if end != first.columns:
        return f"columns {end} to {first.columns} are on no rank"
    plain = (first.numel + sum(part.plain for part in part_by_columns.values())) & _MASK
    weighted = (first.numel + sum(part.weighted for part in part_by_columns.values())) & _MASK
    return f"{plain:016x}{weighted:016x}"
