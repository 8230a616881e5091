"""Packed sequences: the layout of a micro-batch of many responses, and what attention needs to know about it.

A micro-batch is one row of T tokens, the samples one after another, with position ids that restart at each. Nothing is
padded. `Packing` travels through megatron-core as its packed-sequence parameters; its format is neither of upstream's
`sbhd` and `thd`, so that rotary tables are gathered once by position and not sliced per sample in Python.

With context parallelism the row is cut into twice as many equal blocks as there are ranks, and rank r holds the r-th from the
front and the r-th from the back. Every rank then has about as many pairs of query and key of a long sample, where contiguous parts
would give the last rank most of them. The queries of a block attend to keys from the first token of the sample in which the block
begins, up to the block's end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mtpctl.model.draft_attention import EarlierDepths
from mtpctl.model.rope import Rotary

STEP = 32
"""Tokens that `Packing.alike` rounds a sample's length up to a multiple of."""


@dataclass
class Group:
    """Samples of similar length that are computed together, one a row.

    queries [samples, length]: places among this rank's tokens. keys [samples, length]: places among the keys that this rank sees. valid
    [samples, length]: False where an entry only fills up the row. mask [queries, keys]: set where a sample began in an earlier block.
    """

    queries: Tensor
    keys: Tensor
    valid: Tensor
    mask: Tensor | None = None


@dataclass
class Packing(PackedSeqParams):
    """Layout of a micro-batch, as one context-parallel rank sees it.

    A part is the tokens of one sample in one block. A sample that continues in the rank's other block has two parts.

    cu_seqlens_q, cu_seqlens_kv: int32 [parts here + 1], where each part's queries and keys start, and the end.
    max_seqlen_q, max_seqlen_kv: longest part, in queries and keys.
    starts: int64 [samples + 1], where each sample of the whole row starts, and T.
    tokens: int64 [t], the tokens of the row that are this rank's.
    sight: the blocks whose keys this rank's queries attend to, numbered in the order in which ranks hold them, and from which token of
        the block on; empty without context parallelism.
    position_ids: of this rank's tokens, restarting at 0 with each sample.
    lengths: of each part here, in queries and in keys.
    sample_lengths: of all samples of the row. ranks: context-parallel ones that share it.
    spare: how many tokens at the row's end only fill it up.
    rotary: what attention rotates queries and keys by; None where it does not, or where latent attention does so itself.
    earlier: set while the depths of a repeated MTP layer are computed: what its attention is to see of those before.
    routes: uint8 or int16 [t, layers, k], the experts that this rank's tokens are sent to, where `routed` [t] is set; None where every
        router chooses for itself. layers: those of the whole decoder that have experts.
    chosen: where it is a dictionary, each of these layers that this rank has puts the experts of its tokens there, by its place [t, k].
    """

    starts: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.long))
    tokens: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    sight: list[tuple[int, int]] = field(default_factory=list)
    position_ids: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    lengths: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    sample_lengths: list[int] = field(default_factory=list)
    ranks: int = 1
    spare: int = 0
    rotary: Rotary | None = None
    earlier: EarlierDepths | None = None
    routes: Tensor | None = None
    routed: Tensor | None = None
    chosen: dict[int, Tensor] | None = None

    @classmethod
    def of(cls, lengths: list[int], device: torch.device | str, *, cp_rank: int = 0, cp: int = 1) -> Packing:
        """The packing of samples of these lengths, in this order.

        Raises ValueError on an empty sample, and where the tokens do not divide evenly over the blocks of `cp` ranks.
        """
        if not lengths or min(lengths) < 1:
            raise ValueError(f"every sample needs at least one token; the lengths are {lengths}")
        total, count = sum(lengths), blocks(cp)
        if total % count:
            raise ValueError(f"{total} tokens do not divide over the {count} blocks of {cp} context-parallel ranks")
        starts = [0, *accumulate(lengths)]
        size = total // count
        queries, keys, positions, sight = [], [], [], []
        own = [cp_rank] if cp == 1 else [cp_rank, count - 1 - cp_rank]
        for block in own:
            low, high = block * size, (block + 1) * size
            parts = [(first, max(first, low), min(last, high)) for first, last in pairwise(starts) if last > low and first < high]
            queries += [stop - begin for _, begin, stop in parts]
            keys += [stop - first for first, _, stop in parts]
            positions += [torch.arange(begin - first, stop - first) for first, begin, stop in parts]
            if cp > 1:
                began, skipped = divmod(parts[0][0], size)
                sight += [(_held_at(seen, cp), skipped if seen == began else 0) for seen in range(began, block + 1)]
        query_ends = _sums(queries).to(device)
        return cls(
            qkv_format="packed",
            cu_seqlens_q=query_ends,
            cu_seqlens_kv=query_ends if keys == queries else _sums(keys).to(device),
            max_seqlen_q=max(queries),
            max_seqlen_kv=max(keys),
            starts=torch.tensor(starts, device=device),
            tokens=torch.cat([torch.arange(block * size, (block + 1) * size, device=device) for block in own]),
            sight=sight,
            position_ids=torch.cat(positions).to(device),
            lengths=(queries, keys),
            sample_lengths=lengths,
            ranks=cp,
        )

    @cached_property
    def here(self) -> Tensor:
        """int64 [T]: where each token of the row lies among this rank's, -1 for those of other ranks."""
        found = torch.full((int(self.starts[-1]),), -1, device=self.tokens.device)
        found[self.tokens] = torch.arange(len(self.tokens), device=self.tokens.device)
        return found

    @cached_property
    def held(self) -> Tensor:
        """int64 [T]: the place in the row of each token, in the order in which the context-parallel ranks hold them, one after another."""
        count = self.ranks * 2
        size = len(self.tokens) // 2
        blocks = [block for rank in range(self.ranks) for block in (rank, count - 1 - rank)]
        starts = torch.tensor(blocks, device=self.tokens.device)[:, None] * size
        return (starts + torch.arange(size, device=self.tokens.device)).flatten()

    @cached_property
    def row_order(self) -> Tensor:
        """int64 [T]: where each token of the row lies among those that all ranks hold; the inverse of `held`."""
        return self.held.argsort()

    @cached_property
    def whole(self) -> Packing:
        """The same row as one rank sees it that holds all of its tokens."""
        return self if self.ranks == 1 else Packing.of(self.sample_lengths, self.tokens.device)

    @cached_property
    def borders(self) -> tuple[Tensor, Tensor]:
        """`cu_seqlens_q` as int64, on its device and on the host. Kernels of linear attention keep what they computed from these
        two tensors for all layers, and know them by identity."""
        sums = [0, *accumulate(self.lengths[0])]
        return self.cu_seqlens_q.long(), torch.tensor(sums)

    @cached_property
    def padding(self) -> Tensor | None:
        """bool [t]: which of this rank's tokens only fill up the row; None where the row has no such token."""
        return self.tokens >= self.starts[-1] - self.spare if self.spare else None

    def seen(self, gathered: Tensor) -> Tensor:
        """The keys or values that this rank's queries attend to, part by part, from those of all ranks [T, …] in rank order."""
        if not self.sight:
            return gathered
        # The backward pass of one split makes one gradient of the whole row; that of many slices makes one for each slice.
        held = gathered.split(len(self.tokens) // 2)
        return torch.cat([held[block][first:] for block, first in self.sight])

    @cached_property
    def groups(self) -> list[Group]:
        """The parts in few groups. A part shorter than half of its group's longest starts the next group, so at most half of it is padding.

        For operations that have no kernel over packed rows and go through a sample step by step.
        """

        def cut(lengths: list[int]) -> list[int]:
            widths = lengths[:1]
            for length in lengths[1:]:
                widths.append(widths[-1] if 2 * length >= widths[-1] else length)
            return widths

        return self._grouped(cut)

    @cached_property
    def alike(self) -> list[Group]:
        """The parts in groups by their own length, rounded up to a multiple of `STEP`.

        For attention, where the width decides how sums are cut and rounded: a sample's result is the same to the bit whatever samples it
        is packed with.
        """
        return self._grouped(lambda lengths: [-(-length // STEP) * STEP for length in lengths])

    def _grouped(self, widths: Callable[[list[int]], list[int]]) -> list[Group]:
        device = self.position_ids.device
        return [
            Group(g.queries.to(device), g.keys.to(device), g.valid.to(device), None if g.mask is None else g.mask.to(device))
            for g in _groups(*self.lengths, widths)
        ]

    def moved(self, position_ids: Tensor, rotary: Rotary | None, earlier: EarlierDepths) -> Packing:
        """The same tokens at other positions, for attention that adds to `earlier` depths."""
        return replace(self, position_ids=position_ids, rotary=rotary, earlier=earlier)

    def shift(self, values: Tensor, fill: int = 0) -> Tensor:
        """`values` [T] of the whole row moved one token to the left within each sample; the last token of each sample becomes `fill`."""
        shifted = values.roll(-1)
        shifted[self.starts[1:] - 1] = fill
        return shifted


def blocks(cp: int) -> int:
    """Into how many equal blocks a row is cut for `cp` ranks."""
    return 2 * cp if cp > 1 else 1


def _held_at(block: int, cp: int) -> int:
    """The place of a block of the row among those that are held, rank after rank."""
    return 2 * block if block < cp else 2 * (2 * cp - 1 - block) + 1


def _sums(lengths: list[int]) -> Tensor:
    sums = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    sums[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
    return sums


def _groups(queries: list[int], keys: list[int], widths: Callable[[list[int]], list[int]]) -> list[Group]:
    """Parts grouped by the width that `widths` gives each of their lengths, longest first, and filled up to it.

    A part whose sample began in an earlier block, of which a block has one at most, stands alone.
    """
    query_starts, key_starts = _sums(queries).tolist(), _sums(keys).tolist()
    result = []
    for i, (count, seen) in enumerate(zip(queries, keys, strict=True)):
        if seen > count:
            mask = torch.ones(count, seen, dtype=torch.bool).tril(seen - count)
            index = query_starts[i] + torch.arange(count)[None]
            result.append(Group(index, key_starts[i] + torch.arange(seen)[None], torch.ones_like(index, dtype=torch.bool), mask))
    grouped: dict[int, list[int]] = {}
    order = sorted((i for i in range(len(queries)) if keys[i] == queries[i]), key=queries.__getitem__, reverse=True)
    for i, width in zip(order, widths([queries[i] for i in order]), strict=True):
        grouped.setdefault(width, []).append(i)
    for width, group in grouped.items():
        columns = torch.arange(width)[None]
        valid = columns < torch.tensor([queries[i] for i in group])[:, None]
        index, key_index = (torch.tensor([starts[i] for i in group])[:, None] + columns for starts in (query_starts, key_starts))
        result.append(Group(torch.where(valid, index, 0), torch.where(valid, key_index, 0), valid))
    return result
