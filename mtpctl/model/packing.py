"""Packed sequences: how one micro-batch of many responses is laid out, and what attention needs to know of it.

A micro-batch is one row of T tokens, the samples one after another, with position ids that restart at each. Nothing is
padded. `Packing` travels through megatron-core as its packed-sequence parameters; its format is neither of upstream's
`sbhd` and `thd`, so that rotary tables are gathered once by position and not sliced per sample in Python.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass
class Packing(PackedSeqParams):
    """Layout of a micro-batch.

    cu_seqlens_q: int32 [samples + 1], where each sample starts, and T at the end.
    max_seqlen_q: longest sample.
    groups: on a CPU, samples of like length, each group as (token index [samples, length], valid [samples, length]).
    """

    groups: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, lengths: list[int], device: torch.device | str) -> Packing:
        """The packing of samples of these lengths, in this order. Raises ValueError on an empty sample."""
        if not lengths or min(lengths) < 1:
            raise ValueError(f"every sample needs at least one token; the lengths are {lengths}")
        starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        starts[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
        on_cpu = torch.device(device).type == "cpu"
        cu_seqlens = starts.to(device)
        packing = cls(
            qkv_format="packed",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
            groups=_groups(lengths, starts.tolist()) if on_cpu else [],
        )
        return packing

    @property
    def position_ids(self) -> Tensor:
        """[T], restarting at 0 with each sample."""
        assert self.cu_seqlens_q is not None
        starts = self.cu_seqlens_q.long()
        lengths = starts[1:] - starts[:-1]
        return torch.arange(int(starts[-1]), device=starts.device) - torch.repeat_interleave(starts[:-1], lengths)

    @property
    def last_tokens(self) -> Tensor:
        """[samples]: index of each sample's last token."""
        assert self.cu_seqlens_q is not None
        return self.cu_seqlens_q[1:].long() - 1

    def shift(self, values: Tensor, fill: int = 0) -> Tensor:
        """`values` [T] moved one token to the left within each sample; what has no successor becomes `fill`."""
        shifted = values.roll(-1)
        shifted[self.last_tokens] = fill
        return shifted


def _groups(lengths: list[int], starts: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Samples sorted by length and cut where one is shorter than half the longest of its group: at most half is idle."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    groups: list[list[int]] = []
    for i in order:
        if groups and 2 * lengths[i] >= lengths[groups[-1][0]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    result = []
    for group in groups:
        longest = lengths[group[0]]
        columns = torch.arange(longest)
        valid = columns[None] < torch.tensor([lengths[i] for i in group])[:, None]
        index = torch.tensor([starts[i] for i in group])[:, None] + columns[None]
        result.append((torch.where(valid, index, 0), valid))
    return result
