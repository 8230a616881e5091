"""Sums over the sequences of a packed 1-D batch. Shapes: T tokens, S sequences; `seq_ids` [T] holds 0 … S-1.

Where context parallelism leaves a rank with some tokens only of each sequence, `reduce` adds a [S] vector up over the
ranks that hold the others. It is called on detached values alone, so a plain all-reduce serves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]


def sequence_sum(values: Tensor, seq_ids: Tensor, num_sequences: int, reduce: Reduce | None = None) -> Tensor:
    """[T] to [S]: what each sequence's values add up to."""
    sums = torch.zeros(num_sequences, dtype=values.dtype, device=values.device).index_add_(0, seq_ids, values)
    return sums if reduce is None else reduce(sums)


def sequence_mean(values: Tensor, mask: Tensor, seq_ids: Tensor, num_sequences: int, reduce: Reduce | None = None) -> Tensor:
    """[T] to [S]: mean over each sequence's tokens under the mask (0 where it has none)."""
    total = sequence_sum(values * mask, seq_ids, num_sequences, reduce)
    return total / sequence_sum(mask.to(values.dtype), seq_ids, num_sequences, reduce).clamp(min=1)
