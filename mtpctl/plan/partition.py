"""Which sequences go into which micro-batch of which data-parallel rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

_MOST_TOGETHER = 16
"""The largest k that `_least` tries. Where a larger one would give a better bound, `partition` only takes more attempts."""


def partition(lengths: Sequence[int], tokens_per_microbatch: int, dp: int) -> list[list[list[int]]]:
    """Deal sequences out to micro-batches: for each dp rank a list of micro-batches, each a list of indices into `lengths`.

    Every rank gets the same number of micro-batches, of which the last may be empty. Sequences are taken longest first, each into the least
    loaded micro-batch. There are as few micro-batches, in whole multiples of dp, as keep each within the budget this way; a sequence
    longer than the budget is alone in one. Deterministic. Raises ValueError where there is no sequence.
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
    """A lower bound on the micro-batches: of sequences longer than budget / (k + 1), at most k fit into one."""
    return max(-(-int(np.count_nonzero(lengths * (k + 1) > budget)) // k) for k in range(1, _MOST_TOGETHER + 1))


def _dealt(lengths: Sequence[int], order: list[int], budget: int, count: int) -> list[list[int]] | None:
    """Deal the sequences out in this order, each to the least loaded of `count` micro-batches. None where one overflows."""
    bins: list[list[int]] = [[] for _ in range(count)]
    # A heap of load * count + number, so that of equally loaded micro-batches the first is the least. In this order it is a heap already.
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
