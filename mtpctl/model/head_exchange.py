"""Linear attention over context-parallel ranks: from some tokens of all heads to all tokens of some heads, and back.

    [t, heads, …] ──to_heads──► [T, heads / P, …], in the order of the row ──recurrence──► [T, heads / P, …] ──to_tokens──► [t, heads, …]

A recurrence runs over a sample's tokens one after another, so that ranks cannot share the tokens; but its heads know nothing of each
other. As in DeepSpeed-Ulysses (arXiv 2309.14509, section 3.1), with the blocks of `Packing` put into order.

Shape legend: P context-parallel ranks, t tokens of this rank, T = P t tokens of the row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor

from mtpctl.model.packing import Packing


def to_heads(parts: Sequence[Tensor], packing: Packing, group: dist.ProcessGroup) -> list[Tensor]:
    """Each of `parts` [t, heads, …] → [T, heads / P, …], in the order of the row; heads may differ between parts."""
    ranks = group.size()
    sent = [part.unflatten(1, (ranks, -1)) for part in parts]
    shapes = [part.shape[2:] for part in sent]
    # One message for all parts: [P, t, what a rank gets of all of them].
    packed = torch.cat([part.flatten(2) for part in sent], dim=-1).transpose(0, 1).contiguous()
    received: Tensor = all_to_all(group, packed.flatten(0, 1))
    ordered = received.index_select(0, packing.row_order)
    pieces = ordered.split([shape.numel() for shape in shapes], dim=1)
    return [piece.unflatten(1, shape) for piece, shape in zip(pieces, shapes, strict=True)]


def to_tokens(part: Tensor, packing: Packing, group: dist.ProcessGroup) -> Tensor:
    """part [T, heads / P, …], in the order of the row → [t, heads, …]."""
    ranks = group.size()
    sent = part.index_select(0, packing.held)
    received: Tensor = all_to_all(group, sent)
    return received.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2)
