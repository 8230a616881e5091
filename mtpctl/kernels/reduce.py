"""Tensor-parallel collectives of the kernels: row statistics joined over the vocabulary shards, gradients summed over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mtpctl.kernels.inputs import Shard


@dataclass
class RowStats:
    """Softmax statistics of n rows over some columns, for scaled logits z = (h · w) / temperature.

    top: max z; mass: sum exp(z - top); moment: sum exp(z - top) (z - top); target: z of the label, -inf where these columns do not hold it.
    Keeping the moment relative to the maximum keeps entropy exact where logits are large.
    """

    top: Tensor
    mass: Tensor
    moment: Tensor
    target: Tensor

    @property
    def lse(self) -> Tensor:
        return self.top + self.mass.log()

    @property
    def logprob(self) -> Tensor:
        return ((self.target - self.top) - self.mass.log()).clamp(max=0)

    @property
    def entropy(self) -> Tensor:
        return (self.mass.log() - self.moment / self.mass).clamp(min=0)

    @property
    def hit(self) -> Tensor:
        return self.target >= self.top


def join_stats(parts: Tensor) -> RowStats:
    """`parts` [P, 4, n] (top, mass, moment, target of P disjoint sets of columns) as one, in a fixed order. A part without columns has
    mass 0."""
    tops, masses, moments, targets = parts.unbind(1)
    empty = masses == 0
    top = tops.masked_fill(empty, float("-inf")).amax(0)
    shift = (tops - top).masked_fill(empty, 0)
    scale = shift.exp()
    return RowStats(top, (masses * scale).sum(0), ((moments + masses * shift) * scale).sum(0), targets.amax(0))


def gather(x: Tensor, shard: Shard) -> Tensor:
    """`x` of every rank, stacked: [world, ...]."""
    out = x.new_empty(shard.world, *x.shape)
    dist.all_gather(list(out.unbind(0)), x.contiguous(), group=shard.group)
    return out


def join_shards(stats: RowStats, shard: Shard) -> RowStats:
    """Statistics over the whole vocabulary: one all-gather of four numbers a row, joined by every rank in the same order."""
    if shard.world == 1:
        return stats
    return join_stats(gather(torch.stack([stats.top, stats.mass, stats.moment, stats.target]), shard))


def sum_ranks(x: Tensor, shard: Shard) -> Tensor:
    """Sum of `x` over the ranks; may overwrite `x`."""
    if shard.world > 1:
        dist.all_reduce(x, group=shard.group)
    return x
