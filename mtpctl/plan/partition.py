"""Which sequences go into which micro-batch of which data-parallel rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

_MOST_TOGETHER = 16
"""Up to so many sequences of a micro-batch `_least` looks at. A bound that it misses costs time alone."""


def partition(lengths: Sequence[int], tokens_per_microbatch: int, dp: int) -> list[list[list[int]]]:
    """Indices of sequences, for each dp rank a list of micro-batches; every rank gets equally many, of which the last may be empty.

    Longest first into the least loaded of as few micro-batches as fit the budget; a sequence longer than the budget
    stands alone. Deterministic. Raises ValueError on an empty list.
    """
    if not lengths:
        raise ValueError("there is no sequence to pack")
    by_length = np.asarray(lengths)
    order = np.argsort(-by_length, kind="stable").tolist()
    count = max(dp, -(-sum(lengths) // tokens_per_microbatch), _least(by_length, tokens_per_microbatch))
    bins = None
    while bins is None:
        count = -(-count // dp) * dp
        bins = _dealt(lengths, order, tokens_per_microbatch, count)
        count += dp
    return [[sorted(b) for b in bins[rank::dp]] for rank in range(dp)]


def _least(lengths: np.ndarray, budget: int) -> int:
    """A number of micro-batches that is certainly needed: at most k sequences longer than budget / (k + 1) fit into one."""
    return max(-(-int(np.count_nonzero(lengths * (k + 1) > budget)) // k) for k in range(1, _MOST_TOGETHER + 1))


def _dealt(lengths: Sequence[int], order: list[int], budget: int, count: int) -> list[list[int]] | None:
    """The sequences in `order`, each into the least loaded of `count` micro-batches, the first of equals; None where one overflows."""
    bins: list[list[int]] = [[] for _ in range(count)]
    # A heap, as it is, of load * count + number: of equals the first one is least.
    loads = list(range(count))
    alone = count >= len(lengths)
    for i in order:
        length = lengths[i]
        load, number = divmod(loads[0], count)
        if load and load + length > budget and not alone:
            return None
        bins[number].append(i)
        heapq.heapreplace(loads, loads[0] + length * count)
    return bins
