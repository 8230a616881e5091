"""Packed sequences: how one micro-batch of many responses is laid out, and what attention needs to know of it.

A micro-batch is one row of T tokens, the samples one after another, with position ids that restart at each. Nothing is
padded. `Packing` travels through megatron-core as its packed-sequence parameters; its format is neither of upstream's
`sbhd` and `thd`, so that rotary tables are gathered once by position and not sliced per sample in Python.

With context parallelism every rank holds one of equally long, contiguous chunks of the row. Its queries attend to keys from
the first token of the sample that its chunk begins in, up to its chunk's end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

STEP = 32
"""Tokens that `Packing.alike` rounds a sample's length up to a multiple of."""


@dataclass
class Group:
    """Samples of like length that are worked on together, one a row.

    queries [samples, length]: places among this rank's tokens; keys [samples, length]: places among the keys it sees; valid:
    which of them are tokens, the rest only fill up. mask [queries, keys] is there where a sample began in an earlier chunk.
    """

    queries: Tensor
    keys: Tensor
    valid: Tensor
    mask: Tensor | None = None


@dataclass
class Packing(PackedSeqParams):
    """Layout of a micro-batch, as one context-parallel rank sees it.

    cu_seqlens_q, cu_seqlens_kv: int32 [samples here + 1], where each sample's queries and keys start, and the end.
    max_seqlen_q, max_seqlen_kv: longest sample, in queries and keys.
    starts: int64 [samples + 1], where each sample of the whole row starts, and T.
    chunk: the tokens of the row that are this rank's; first_key: the first token of the row whose key it sees.
    position_ids: of this rank's tokens, restarting at 0 with each sample.
    lengths: of each sample here, in queries and in keys.
    """

    starts: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.long))
    chunk: slice = field(default_factory=lambda: slice(0, 0))
    first_key: int = 0
    position_ids: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    lengths: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))

    @classmethod
    def of(cls, lengths: list[int], device: torch.device | str, *, cp_rank: int = 0, cp: int = 1) -> Packing:
        """The packing of samples of these lengths, in this order.

        Raises ValueError on an empty sample, and where the tokens do not divide evenly over `cp` ranks.
        """
        if not lengths or min(lengths) < 1:
            raise ValueError(f"every sample needs at least one token; the lengths are {lengths}")
        if sum(lengths) % cp:
            raise ValueError(f"{sum(lengths)} tokens do not divide over {cp} context-parallel ranks")
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        size = starts[-1] // cp
        low, high = cp_rank * size, (cp_rank + 1) * size
        here = [(first, max(first, low), min(last, high)) for first, last in pairwise(starts) if last > low and first < high]
        queries = [stop - begin for _, begin, stop in here]
        keys = [stop - first for first, _, stop in here]
        positions = torch.cat([torch.arange(begin - first, stop - first) for first, begin, stop in here])
        arguments: dict[str, Any] = {
            "qkv_format": "packed",
            "cu_seqlens_q": _sums(queries).to(device),
            "cu_seqlens_kv": _sums(keys).to(device),
            "max_seqlen_q": max(queries),
            "max_seqlen_kv": max(keys),
        }
        return cls(
            **arguments,
            starts=torch.tensor(starts, device=device),
            chunk=slice(low, high),
            first_key=here[0][0],
            position_ids=positions.to(device),
            lengths=(queries, keys),
        )

    @cached_property
    def groups(self) -> list[Group]:
        """The samples in few groups, one shorter than half its group's longest in the next: at most half of a group is idle.

        For what has no kernel over packed rows and goes through a sample step by step.
        """

        def cut(lengths: list[int]) -> list[int]:
            widths = lengths[:1]
            for length in lengths[1:]:
                widths.append(widths[-1] if 2 * length >= widths[-1] else length)
            return widths

        return self._grouped(cut)

    @cached_property
    def alike(self) -> list[Group]:
        """The samples in groups whose width follows from a sample's own length: that, rounded up to a multiple of `STEP`.

        For attention, whose sums are cut by the width: so a sample's result is the same to the bit whatever it is packed with.
        """
        return self._grouped(lambda lengths: [-(-length // STEP) * STEP for length in lengths])

    def _grouped(self, widths: Callable[[list[int]], list[int]]) -> list[Group]:
        device = self.position_ids.device
        return [
            Group(g.queries.to(device), g.keys.to(device), g.valid.to(device), None if g.mask is None else g.mask.to(device))
            for g in _groups(*self.lengths, widths)
        ]

    @property
    def seen(self) -> slice:
        """The tokens of the row whose keys this rank's queries attend to."""
        return slice(self.first_key, self.chunk.stop)

    def shift(self, values: Tensor, fill: int = 0) -> Tensor:
        """`values` [T] of the whole row moved one token to the left within each sample; what has no successor becomes `fill`."""
        shifted = values.roll(-1)
        shifted[self.starts[1:] - 1] = fill
        return shifted


def _sums(lengths: list[int]) -> Tensor:
    sums = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    sums[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
    return sums


def _groups(queries: list[int], keys: list[int], widths: Callable[[list[int]], list[int]]) -> list[Group]:
    """Samples grouped by the width that `widths` gives each of their lengths, longest first, and filled up to it.

    The sample that began in an earlier chunk, if there is one, stands alone.
    """
    query_starts, key_starts = _sums(queries).tolist(), _sums(keys).tolist()
    result = []
    split = keys[0] > queries[0]
    if split:
        mask = torch.ones(queries[0], keys[0], dtype=torch.bool).tril(keys[0] - queries[0])
        index = torch.arange(queries[0])[None]
        result.append(Group(index, torch.arange(keys[0])[None], torch.ones_like(index, dtype=torch.bool), mask))
    grouped: dict[int, list[int]] = {}
    order = sorted(range(int(split), len(queries)), key=queries.__getitem__, reverse=True)
    for i, width in zip(order, widths([queries[i] for i in order]), strict=True):
        grouped.setdefault(width, []).append(i)
    for width, group in grouped.items():
        columns = torch.arange(width)[None]
        valid = columns < torch.tensor([queries[i] for i in group])[:, None]
        index, key_index = (torch.tensor([starts[i] for i in group])[:, None] + columns for starts in (query_starts, key_starts))
        result.append(Group(torch.where(valid, index, 0), torch.where(valid, key_index, 0), valid))
    return result
