"""Assignment of sequences to microbatches and ranks."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpctl.plan.partition import partition

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


class TestPartition:
    @given(LENGTHS, st.integers(1, 100), st.integers(1, 4))
    def test_every_sequence_is_assigned_once_and_ranks_have_equally_many_microbatches(self, lengths, budget, dp):
        parts = partition(lengths, budget, dp)
        assert sorted(i for rank in parts for micro in rank for i in micro) == list(range(len(lengths)))
        assert len({len(rank) for rank in parts}) == 1

    @given(LENGTHS, st.integers(1, 100), st.integers(1, 4))
    def test_microbatches_keep_the_budget_unless_they_have_one_sequence(self, lengths, budget, dp):
        for rank in partition(lengths, budget, dp):
            for micro in rank:
                assert len(micro) <= 1 or sum(lengths[i] for i in micro) <= budget

    @given(st.lists(st.integers(20, 30), min_size=32, max_size=64))
    def test_ranks_are_balanced(self, lengths):
        """Longest first, two microbatches differ by at most one sequence, and ranks by that for each of their microbatches."""
        ranks = partition(lengths, 120, 2)
        loads = [sum(lengths[i] for micro in rank for i in micro) for rank in ranks]
        assert max(loads) - min(loads) <= len(ranks[0]) * max(lengths)

    def test_no_sequence_is_an_error(self):
        with pytest.raises(ValueError, match="no sequence"):
            partition([], 10, 1)

    @given(LENGTHS, st.integers(1, 100), st.integers(1, 4))
    def test_the_number_of_microbatches_is_minimal_for_longest_first(self, lengths, budget, dp):
        """Compared with a search over the number of microbatches that recomputes every load."""
        count = -(-max(dp, -(-sum(lengths) // budget)) // dp) * dp
        while True:
            loads, sizes = [0] * count, [0] * count
            for length in sorted(lengths, reverse=True):
                least = loads.index(min(loads))
                loads[least], sizes[least] = loads[least] + length, sizes[least] + 1
            if count >= len(lengths) or all(load <= budget or size == 1 for load, size in zip(loads, sizes, strict=True)):
                break
            count += dp
        assert len(partition(lengths, budget, dp)[0]) * dp == count

    def test_a_large_step_over_many_ranks_is_fast(self):
        """The bound is 0.5 s of CPU time, which does not depend on other processes."""
        draw = random.Random(0)
        lengths = [draw.randint(1000, 5000) for _ in range(16_384)]
        began = time.process_time()
        partition(lengths, 8192, 64)
        assert time.process_time() - began < 0.5
