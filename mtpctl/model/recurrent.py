"""The parts that linear attention and Mamba-2 share: the short convolution, and context parallelism.

With context parallelism the recurrence needs all tokens of a sample, but its heads are independent. Ranks therefore exchange some tokens of
all heads for all tokens of some heads, as in DeepSpeed-Ulysses (arXiv 2309.14509, section 3.1), and reorder the blocks of `Packing`:

    [t, heads, …] ──to_heads──► [T, heads / P, …], in row order ──recurrence──► [T, heads / P, …] ──to_tokens──► [t, heads, …]

Shape legend: P context-parallel ranks, t tokens of this rank, T = P t tokens of the row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor

from mtpctl.model.packing import Packing


def convolve(x: Tensor, weight: Tensor, position_ids: Tensor) -> Tensor:
    """Depthwise causal convolution of x [T, channels] with weight [channels, width], zero-padded at the start of each sample."""
    taps = weight.unbind(-1)
    out = x * taps[-1]
    for back, tap in enumerate(reversed(taps[:-1]), start=1):
        earlier = F.pad(x, (0, 0, back, 0))[: len(x)]
        out = out + earlier.masked_fill((position_ids < back)[:, None], 0.0) * tap
    return out


def exchange(
    mixed: Tensor, widths: Sequence[int], counts: Sequence[int], others: Sequence[Tensor], packing: Packing, group: dist.ProcessGroup
) -> list[Tensor]:
    """Exchange this rank's tokens of all heads [t, …] for all tokens of this rank's heads [T, …].

    mixed [t, channels]: fused parts of these `widths` with `counts` heads or groups. others: tensors [t, heads]. Returns all of them.
    """
    parts = [x.unflatten(-1, (count, -1)) for x, count in zip(mixed.split(list(widths), dim=-1), counts, strict=True)]
    received = to_heads([*parts, *others], packing, group)
    return [torch.cat([part.flatten(1) for part in received[: len(parts)]], dim=-1), *received[len(parts) :]]


def own_channels(weight: Tensor, widths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The rows of the heads that this context-parallel rank computes, of a fused weight with parts of these `widths`."""
    return torch.cat(own_heads(weight.split(list(widths)), group))


def own_heads(weights: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """The rows of the heads that this context-parallel rank computes."""
    return [weight.chunk(group.size())[group.rank()] for weight in weights]


def to_heads(parts: Sequence[Tensor], packing: Packing, group: dist.ProcessGroup) -> list[Tensor]:
    """Each of `parts` [t, heads, …] → [T, heads / P, …] in row order. Parts may differ in their number of heads."""
    ranks = group.size()
    sent = [part.unflatten(1, (ranks, -1)) for part in parts]
    shapes = [part.shape[2:] for part in sent]
    # One message for all parts: [P, t, all parts' values for a rank].
    packed = torch.cat([part.flatten(2) for part in sent], dim=-1).transpose(0, 1).contiguous()
    received: Tensor = all_to_all(group, packed.flatten(0, 1))
    ordered = received.index_select(0, packing.row_order)
    pieces = ordered.split([shape.numel() for shape in shapes], dim=1)
    return [piece.unflatten(1, shape) for piece, shape in zip(pieces, shapes, strict=True)]


def to_tokens(part: Tensor, packing: Packing, group: dist.ProcessGroup) -> Tensor:
    """part [T, heads / P, …] in row order → [t, heads, …]."""
    sent = part.index_select(0, packing.cp_order)
    received: Tensor = all_to_all(group, sent)
    return received.unflatten(0, (group.size(), -1)).transpose(0, 1).flatten(1, 2)
