"""Assigns sequences to microbatches of data-parallel ranks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

_MAX_K = 16
"""Maximum k that `_lower_bound` tries. If a larger k would give a better bound, `partition` only needs more attempts."""


def partition(lengths: Sequence[int], tokens_per_microbatch: int, dp: int) -> list[list[list[int]]]:
    """Assign sequences to microbatches: for each dp rank a list of microbatches, each a list of indices into `lengths`.

    Every rank gets the same number of microbatches, the last of which may be empty. Sequences are assigned longest first, each to the least
    loaded microbatch. The number of microbatches is the smallest multiple of dp that keeps each within the budget; a sequence longer than
    the budget gets its own. Deterministic. Raises ValueError if there are no sequences.
    """
    if not lengths:
        raise ValueError("there is no sequence to pack")
    by_length = np.asarray(lengths)
    order = np.argsort(-by_length, kind="stable").tolist()
    count = max(dp, -(-sum(lengths) // tokens_per_microbatch), _lower_bound(by_length, tokens_per_microbatch))
    bins = None
    while bins is None:
        count = -(-count // dp) * dp
        bins = _assign(lengths, order, tokens_per_microbatch, count)
        count += dp
    return [[sorted(b) for b in bins[rank::dp]] for rank in range(dp)]


def _lower_bound(lengths: np.ndarray, budget: int) -> int:
    """A lower bound on the number of microbatches: at most k sequences longer than budget / (k + 1) fit into one."""
    return max(-(-int(np.count_nonzero(lengths * (k + 1) > budget)) // k) for k in range(1, _MAX_K + 1))


def _assign(lengths: Sequence[int], order: list[int], budget: int, count: int) -> list[list[int]] | None:
    """Assign the sequences in this order, each to the least loaded of `count` microbatches. None if one overflows."""
    bins: list[list[int]] = [[] for _ in range(count)]
    # A heap of load * count + index, so that the first of equally loaded microbatches is the smallest. This range already is a heap.
    loads = list(range(count))
    one_per_bin = count >= len(lengths)
    for i in order:
        length = lengths[i]
        load, number = divmod(loads[0], count)
        if load and load + length > budget and not one_per_bin:
            return None
        bins[number].append(i)
        heapq.heapreplace(loads, loads[0] + length * count)
    return bins
