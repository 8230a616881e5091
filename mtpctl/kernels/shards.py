"""Vocabulary shards of tensor-parallel ranks: row statistics of a shard, and the collectives that combine them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """This rank's vocabulary entries, `start` to `start + columns`, out of `total`."""

    group: dist.ProcessGroup | None
    rank: int
    world: int
    start: int
    columns: int
    total: int

    @property
    def valid(self) -> int:
        """Number of columns that are vocabulary entries rather than padding."""
        return max(0, min(self.columns, self.total - self.start))


def vocab_shard(weight: Tensor, group: dist.ProcessGroup | None, valid_vocab: int | None) -> Shard:
    """The shard of `weight` [V, H]. V must be equal on all ranks. Raises ValueError if `valid_vocab` is not 1 to their sum."""
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    columns = weight.shape[0]
    total = columns * world if valid_vocab is None else valid_vocab
    if not 0 < total <= columns * world:
        raise ValueError(f"valid_vocab: {valid_vocab}, expected 1 to {columns * world} (weight's {columns} rows on {world} ranks)")
    return Shard(group, rank, world, rank * columns, columns, total)


@dataclass
class RowStats:
    """Softmax statistics of n rows over some columns, of scaled logits z = (h · w) / temperature.

    top: max z. mass: Σ exp(z − top). moment: Σ exp(z − top) (z − top); relative to the maximum, so that entropy is precise for large
    logits. target: z of the label, −inf if it is not among these columns.
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

    def joined(self, shard: Shard) -> RowStats:
        """Statistics over the whole vocabulary: one all-gather of four numbers per row, combined in the same order on every rank."""
        return join_stats(gather(torch.stack([self.top, self.mass, self.moment, self.target]), shard))


def join_stats(parts: Tensor) -> RowStats:
    """Combine `parts` [P, 4, n]: top, mass, moment and target of P disjoint sets of columns. An empty set has mass 0."""
    tops, masses, moments, targets = parts.unbind(1)
    empty = masses == 0
    top = tops.masked_fill(empty, float("-inf")).amax(0)
    shift = (tops - top).masked_fill(empty, 0)
    scale = shift.exp()
    return RowStats(top, (masses * scale).sum(0), ((moments + masses * shift) * scale).sum(0), targets.amax(0))


def gather(x: Tensor, shard: Shard) -> Tensor:
    """Stack `x` of every rank: [world, ...]."""
    out = x.new_empty(shard.world, *x.shape)
    dist.all_gather(list(out.unbind(0)), x.contiguous(), group=shard.group)
    return out


def join_shards(stats: RowStats, shard: Shard) -> RowStats:
    """Statistics over the whole vocabulary, equal on all ranks."""
    return stats if shard.world == 1 else stats.joined(shard)


def sum_ranks(x: Tensor, shard: Shard) -> Tensor:
    """Sum `x` over the ranks, in place."""
    if shard.world > 1:
        dist.all_reduce(x, group=shard.group)
    return x
