"""Packed sequences: the layout of a microbatch of many samples, as attention needs it.

A microbatch is one packed sequence of T tokens: the samples, concatenated without padding, with position ids that restart at each sample.
`Packing` is passed as Megatron's packed-sequence parameters. Its format is neither `sbhd` nor `thd`, so that rotary tables are indexed by
position once instead of sliced per sample in Python.

With context parallelism (CP) the packed sequence is split into twice as many equal blocks as there are ranks. Rank r has the r-th block
from the front and the r-th from the back, which balances the query-key pairs of a long sample over ranks. A block's first sample may begin
in an earlier block, so the block's keys run from that sample's first token to the block's end.

Linear attention and Mamba-2 need all tokens of a sample, but their heads are independent. With CP, ranks therefore exchange some tokens of
all heads for all tokens of some heads, as in DeepSpeed-Ulysses (arXiv 2309.14509, section 3.1), and reorder the blocks:

    [t, heads, …] ─tokens_to_heads─► [T, heads / P, …], in order ─recurrence─► [T, heads / P, …] ─heads_to_tokens─► [t, heads, …]

Shape legend: P context-parallel ranks, t tokens of this rank, T = P t tokens of the packed sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor

from mtpctl.model.rope import Rotary

WIDTH_STEP = 32
"""`Packing.attention_groups` rounds lengths up to a multiple of this."""


@dataclass
class EarlierDepths:
    """Keys and values [t, KV heads, width] of this rank's tokens, one per MTP depth so far. Attention appends the current depth's."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


@dataclass
class LengthGroup:
    """Parts of similar length that are computed as one padded batch.

    queries [parts, length]: indices among this rank's tokens. keys [parts, length]: indices in the result of `select_visible`. valid
    [parts, length]: False for padding. mask [queries, keys]: needed if a sample began in an earlier block; None: causal.
    """

    queries: Tensor
    keys: Tensor
    valid: Tensor
    mask: Tensor | None = None


@dataclass
class Packing(PackedSeqParams):
    """Layout of a microbatch on one CP rank.

    A part is the tokens of one sample in one block; a sample may have two parts on a rank.

    cu_seqlens_q, cu_seqlens_kv: int32 [parts on this rank + 1], start of each part's queries and keys, and the end.
    max_seqlen_q, max_seqlen_kv: longest part, in queries and keys.
    starts: int64 [samples + 1], start of each sample, and T.
    tokens: int64 [t], indices of this rank's tokens in the packed sequence.
    visible_blocks: the blocks whose keys this rank's queries attend to, as (index of the block in CP order, first visible token of the
    block); empty without CP.
    position_ids: of this rank's tokens, restarting at 0 with each sample.
    lengths: queries and keys of each part on this rank. sample_lengths: of all samples. ranks: number of CP ranks.
    padding_tokens: number of padding tokens at the end of the packed sequence.
    rotary: rotation of queries and keys; None for latent attention, which rotates them itself. window_rotary: that of layers with a window.
    earlier: keys and values of earlier depths, while the depths of a repeated MTP layer are computed.
    routes: uint8 or int16 [t, MoE layers, k], experts to replay for tokens with `routed` [t] set. None: nothing is replayed.
    recorded: None, or a dictionary in which each MoE layer of this rank stores its tokens' experts [t, k] under its index.
    """

    starts: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.long))
    tokens: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    visible_blocks: list[tuple[int, int]] = field(default_factory=list)
    position_ids: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    lengths: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    sample_lengths: list[int] = field(default_factory=list)
    ranks: int = 1
    padding_tokens: int = 0
    rotary: Rotary | None = None
    window_rotary: Rotary | None = None
    earlier: EarlierDepths | None = None
    routes: Tensor | None = None
    routed: Tensor | None = None
    recorded: dict[int, Tensor] | None = None

    @classmethod
    def of(cls, lengths: list[int], device: torch.device | str, *, cp_rank: int = 0, cp: int = 1) -> Packing:
        """Pack samples of these lengths, in this order.

        Raises ValueError if a sample is empty, or if the tokens do not divide evenly over the blocks of `cp` ranks.
        """
        if not lengths or min(lengths) < 1:
            raise ValueError(f"every sample needs at least one token; the lengths are {lengths}")
        total, block_count = sum(lengths), num_blocks(cp)
        if total % block_count:
            raise ValueError(f"{total} tokens do not divide over the {block_count} blocks of {cp} context-parallel ranks")
        starts = [0, *accumulate(lengths)]
        block_size = total // block_count
        queries, keys, positions, visible_blocks = [], [], [], []
        local_blocks = [cp_rank] if cp == 1 else [cp_rank, block_count - 1 - cp_rank]
        for block in local_blocks:
            block_start, block_end = block * block_size, (block + 1) * block_size
            parts = [
                (first, max(first, block_start), min(last, block_end))
                for first, last in pairwise(starts)
                if last > block_start and first < block_end
            ]
            queries += [end - begin for _, begin, end in parts]
            keys += [end - first for first, _, end in parts]
            positions += [torch.arange(begin - first, end - first) for first, begin, end in parts]
            if cp > 1:
                first_block, first_token = divmod(parts[0][0], block_size)
                visible_blocks += [
                    (_cp_position(visible_block, cp), first_token if visible_block == first_block else 0)
                    for visible_block in range(first_block, block + 1)
                ]
        query_ends = _cumulative_lengths(queries).to(device)
        return cls(
            qkv_format="packed",
            cu_seqlens_q=query_ends,
            cu_seqlens_kv=query_ends if keys == queries else _cumulative_lengths(keys).to(device),
            max_seqlen_q=max(queries),
            max_seqlen_kv=max(keys),
            starts=torch.tensor(starts, device=device),
            tokens=torch.cat([torch.arange(block * block_size, (block + 1) * block_size, device=device) for block in local_blocks]),
            visible_blocks=visible_blocks,
            position_ids=torch.cat(positions).to(device),
            lengths=(queries, keys),
            sample_lengths=lengths,
            ranks=cp,
        )

    @cached_property
    def local_index(self) -> Tensor:
        """int64 [T]: index of each token of the packed sequence among this rank's tokens, -1 for tokens of other ranks."""
        index = torch.full((int(self.starts[-1]),), -1, device=self.tokens.device)
        index[self.tokens] = torch.arange(len(self.tokens), device=self.tokens.device)
        return index

    @cached_property
    def cp_order(self) -> Tensor:
        """int64 [T]: indices in the packed sequence of the tokens of all CP ranks, in rank order."""
        block_count = self.ranks * 2
        block_size = len(self.tokens) // 2
        blocks = [block for rank in range(self.ranks) for block in (rank, block_count - 1 - rank)]
        starts = torch.tensor(blocks, device=self.tokens.device)[:, None] * block_size
        return (starts + torch.arange(block_size, device=self.tokens.device)).flatten()

    @cached_property
    def token_order(self) -> Tensor:
        """int64 [T]: the inverse of `cp_order`."""
        return self.cp_order.argsort()

    @cached_property
    def full_packing(self) -> Packing:
        """The packing of the whole packed sequence, as without CP."""
        return self if self.ranks == 1 else Packing.of(self.sample_lengths, self.tokens.device)

    @cached_property
    def boundaries(self) -> tuple[Tensor, Tensor]:
        """`cu_seqlens_q` as int64, on its device and on the host.

        Linear attention kernels cache results per tensor identity, so all layers must pass the same two tensors.
        """
        sums = [0, *accumulate(self.lengths[0])]
        return self.cu_seqlens_q.long(), torch.tensor(sums)

    @cached_property
    def padding_mask(self) -> Tensor | None:
        """bool [t]: this rank's padding tokens; None if there is no padding."""
        return self.tokens >= self.starts[-1] - self.padding_tokens if self.padding_tokens else None

    def select_visible(self, gathered: Tensor) -> Tensor:
        """Select the keys or values that this rank's queries attend to, part by part, from those of all ranks [T, …] in rank order."""
        if not self.visible_blocks:
            return gathered
        # The backward pass of one split allocates one gradient of the whole packed sequence; many slices would allocate one each.
        split = gathered.split(len(self.tokens) // 2)
        return torch.cat([split[block][first:] for block, first in self.visible_blocks])

    @cached_property
    def recurrence_groups(self) -> list[LengthGroup]:
        """The parts in few groups, for recurrences without a kernel for packed sequences.

        A part shorter than half of the group's longest starts a new group, so at most half of a group is padding.
        """

        def widths(lengths: list[int]) -> list[int]:
            result = lengths[:1]
            for length in lengths[1:]:
                result.append(result[-1] if 2 * length >= result[-1] else length)
            return result

        return self._build_groups(widths)

    @cached_property
    def attention_groups(self) -> list[LengthGroup]:
        """The parts grouped by length, rounded up to a multiple of `WIDTH_STEP`.

        For attention: its order of summation depends on the width, so this makes a sample's result independent of the other samples.
        """
        return self._build_groups(lambda lengths: [-(-length // WIDTH_STEP) * WIDTH_STEP for length in lengths])

    def _build_groups(self, widths: Callable[[list[int]], list[int]]) -> list[LengthGroup]:
        device = self.position_ids.device
        return [
            LengthGroup(g.queries.to(device), g.keys.to(device), g.valid.to(device), None if g.mask is None else g.mask.to(device))
            for g in _group_parts(*self.lengths, widths)
        ]

    def at_depth(self, position_ids: Tensor, rotary: Rotary | None, earlier: EarlierDepths, window_rotary: Rotary | None = None) -> Packing:
        """The same tokens at other positions, for attention that appends to `earlier` depths."""
        return replace(self, position_ids=position_ids, rotary=rotary, window_rotary=window_rotary, earlier=earlier)

    def with_rotary(self, rotary: Rotary | None) -> Packing:
        """The same tokens with another rotation of queries and keys."""
        return replace(self, rotary=rotary)

    def shift(self, values: Tensor) -> Tensor:
        """Shift `values` [T] of the whole packed sequence one token to the left within each sample; each last value becomes 0."""
        shifted = values.roll(-1)
        shifted[self.starts[1:] - 1] = 0
        return shifted


def num_blocks(cp: int) -> int:
    """Number of equal blocks into which a packed sequence is split for `cp` ranks."""
    return 2 * cp if cp > 1 else 1


def _cp_position(block: int, cp: int) -> int:
    """Index of a block in CP order."""
    return 2 * block if block < cp else 2 * (2 * cp - 1 - block) + 1


def _cumulative_lengths(lengths: list[int]) -> Tensor:
    sums = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    sums[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
    return sums


def _group_parts(queries: list[int], keys: list[int], widths: Callable[[list[int]], list[int]]) -> list[LengthGroup]:
    """Group parts by their padded width, longest first. `widths` maps descending lengths to widths.

    A part whose sample began in an earlier block (at most one per block) forms its own group.
    """
    query_starts, key_starts = _cumulative_lengths(queries).tolist(), _cumulative_lengths(keys).tolist()
    result = []
    for i, (query_count, key_count) in enumerate(zip(queries, keys, strict=True)):
        if key_count > query_count:
            mask = torch.ones(query_count, key_count, dtype=torch.bool).tril(key_count - query_count)
            index = query_starts[i] + torch.arange(query_count)[None]
            result.append(LengthGroup(index, key_starts[i] + torch.arange(key_count)[None], torch.ones_like(index, dtype=torch.bool), mask))
    grouped: dict[int, list[int]] = {}
    order = sorted((i for i in range(len(queries)) if keys[i] == queries[i]), key=queries.__getitem__, reverse=True)
    for i, width in zip(order, widths([queries[i] for i in order]), strict=True):
        grouped.setdefault(width, []).append(i)
    for width, group in grouped.items():
        columns = torch.arange(width)[None]
        valid = columns < torch.tensor([queries[i] for i in group])[:, None]
        index, key_index = (torch.tensor([starts[i] for i in group])[:, None] + columns for starts in (query_starts, key_starts))
        result.append(LengthGroup(torch.where(valid, index, 0), torch.where(valid, key_index, 0), valid))
    return result


def convolve(x: Tensor, weight: Tensor, position_ids: Tensor) -> Tensor:
    """Depthwise causal convolution of x [T, channels] with weight [channels, width], zero-padded at the start of each sample."""
    taps = weight.unbind(-1)
    out = x * taps[-1]
    for distance, tap in enumerate(reversed(taps[:-1]), start=1):
        earlier = F.pad(x, (0, 0, distance, 0))[: len(x)]
        out = out + earlier.masked_fill((position_ids < distance)[:, None], 0.0) * tap
    return out


def exchange_heads(
    mixed: Tensor, widths: Sequence[int], head_counts: Sequence[int], others: Sequence[Tensor], packing: Packing, group: dist.ProcessGroup
) -> list[Tensor]:
    """Exchange this rank's tokens of all heads [t, …] for all tokens of this rank's heads [T, …].

    mixed [t, channels]: projections of these `widths`, concatenated; each has `head_counts` heads or groups. others: further tensors
    [t, heads], such as gates. Returns the exchanged `mixed` and `others`.
    """
    parts = [x.unflatten(-1, (count, -1)) for x, count in zip(mixed.split(list(widths), dim=-1), head_counts, strict=True)]
    received = tokens_to_heads([*parts, *others], packing, group)
    return [torch.cat([part.flatten(1) for part in received[: len(parts)]], dim=-1), *received[len(parts) :]]


def local_channels(weight: Tensor, widths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The rows of a fused weight that belong to this context-parallel rank's heads. widths: rows of each part of the weight."""
    return torch.cat(local_heads(weight.split(list(widths)), group))


def local_heads(weights: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """The rows of each weight that belong to this context-parallel rank's heads."""
    return [weight.chunk(group.size())[group.rank()] for weight in weights]


def tokens_to_heads(parts: Sequence[Tensor], packing: Packing, group: dist.ProcessGroup) -> list[Tensor]:
    """Each of `parts` [t, heads, …] → [T, heads / P, …] in the order of the packed sequence. Parts may differ in their number of heads."""
    ranks = group.size()
    split_parts = [part.unflatten(1, (ranks, -1)) for part in parts]
    shapes = [part.shape[2:] for part in split_parts]
    # One message for all parts: [P, t, all parts' values for a rank].
    message = torch.cat([part.flatten(2) for part in split_parts], dim=-1).transpose(0, 1).contiguous()
    received: Tensor = all_to_all(group, message.flatten(0, 1))
    ordered = received.index_select(0, packing.token_order)
    pieces = ordered.split([shape.numel() for shape in shapes], dim=1)
    return [piece.unflatten(1, shape) for piece, shape in zip(pieces, shapes, strict=True)]


def heads_to_tokens(part: Tensor, packing: Packing, group: dist.ProcessGroup) -> Tensor:
    """part [T, heads / P, …] in the order of the packed sequence → [t, heads, …]."""
    sent = part.index_select(0, packing.cp_order)
    received: Tensor = all_to_all(group, sent)
    return received.unflatten(0, (group.size(), -1)).transpose(0, 1).flatten(1, 2)
