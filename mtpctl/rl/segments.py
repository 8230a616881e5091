"""Sums over the sequences of a packed 1-D batch. Shapes: T tokens, S sequences; `seq_ids` [T] holds 0 … S-1."""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_sum(values: Tensor, seq_ids: Tensor, num_sequences: int) -> Tensor:
    """The sum of each sequence's values: [T] to [S]."""
    return torch.zeros(num_sequences, dtype=values.dtype, device=values.device).index_add_(0, seq_ids, values)


def sequence_mean(values: Tensor, mask: Tensor, seq_ids: Tensor, num_sequences: int) -> Tensor:
    """The mean of each sequence's values where the mask is 1: [T] to [S]; 0 for a sequence whose mask is 0 throughout."""
    total = sequence_sum(values * mask, seq_ids, num_sequences)
    return total / sequence_sum(mask.to(values.dtype), seq_ids, num_sequences).clamp(min=1)
