"""Distribution of an update's samples to data-parallel ranks: every sample arrives once and unchanged."""

from __future__ import annotations

import pickle
import random
import time
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpctl.errors import RuntimeFailure
from mtpctl.samples import Sample, ids_of, logprobs_of, mask_of
from mtpctl.trainer.share import distribute, partition


def drawn(count: int, *, group: int = 4, seed: int = 0, longest: int = 30) -> list[Sample]:
    """Samples in groups: some are empty, have several versions and turns, or have old log-probs and routes."""
    draw, share_builders = random.Random(seed), []
    for number in range(count):
        sample = Sample(
            f"p{number // group}", str(number // group), [draw.randrange(99) for _ in range(draw.randint(1, 9))], number % group
        )
        sample.reward = draw.random()
        for version in range(draw.randint(0, 3)):
            tokens = [draw.randrange(99) for _ in range(draw.randint(1, longest))]
            sample.append(
                tokens, [-draw.random() for _ in tokens], version, trained=draw.random() < 0.7, stale_kv=version > 0 and draw.random() < 0.5
            )
        if sample.response_ids and draw.random() < 0.5:
            sample.old_logprobs, sample.old_version = logprobs_of(-draw.random() for _ in sample.response_ids), 2
        if draw.random() < 0.5:
            sample.teacher_logprobs = logprobs_of(-draw.random() for _ in sample.response_ids)
            if draw.random() < 0.5:
                sample.candidates = ids_of(draw.randrange(99) for _ in range(3 * len(sample.response_ids)))
                sample.candidate_logprobs = logprobs_of(-draw.random() for _ in range(3 * len(sample.response_ids)))
        if draw.random() < 0.5:
            sample.add_routes(np.full((sample.length - 1, 2, 2), number % 8, np.uint8))
        share_builders.append(sample)
    return share_builders


@pytest.mark.parametrize(("dp", "minibatches", "count"), [(1, 1, 12), (3, 2, 40), (8, 3, 9), (64, 1, 20)])
def test_every_non_empty_sample_reaches_one_rank_unchanged(dp: int, minibatches: int, count: int) -> None:
    samples = drawn(count)
    table, share_builders = distribute(samples, minibatches=minibatches, tokens_per_microbatch=64, dp=dp)
    shares = [pickle.loads(pickle.dumps(build_share(), pickle.HIGHEST_PROTOCOL)) for build_share in share_builders]
    assert [share.dp_rank for share in shares] == list(range(dp))
    indices = list(chain.from_iterable(share.indices.tolist() for share in shares))
    assert sorted(indices) == [index for index, sample in enumerate(samples) if sample.response_ids]
    old_versions = list(chain.from_iterable(share.old_versions.tolist() for share in shares))
    versions = list(chain.from_iterable(share.versions() for share in shares))
    stale_kv = [each.tolist() for each in chain.from_iterable(share.stale_kv() for share in shares)]
    sequences = list(chain.from_iterable(share.sequences() for share in shares))
    for index, sequence, of_tokens, stale, old_version in zip(indices, sequences, versions, stale_kv, old_versions, strict=True):
        sample = samples[index]
        assert sequence.name == sample.name and sequence.prompt_length == len(sample.prompt_ids)
        assert sequence.token_ids.tolist() == sample.token_ids.tolist()
        assert sequence.loss_mask.tolist() == [bool(each) for each in sample.loss_mask]
        assert of_tokens.tolist() == [span.version for span in sample.version_spans for _ in range(span.start, span.end)]
        assert stale == [span.stale_kv for span in sample.version_spans for _ in range(span.start, span.end)]
        assert old_version == (-1 if sample.old_version is None else sample.old_version)
        columns = {"behaviour": sample.behaviour_logprobs, "old": sample.old_logprobs, "teacher": sample.teacher_logprobs}
        columns |= {"candidates": sample.candidates, "candidate_logprobs": sample.candidate_logprobs}
        expected = {name: values.tolist() for name, values in columns.items() if values is not None}
        assert {name: values.flatten().tolist() for name, values in sequence.columns.items()} == expected
        assert sequence.routes is sample.routes is None or np.array_equal(sequence.routes, sample.routes)
    assert table.rewards.tolist() == [sample.reward for sample in samples]
    assert table.sampled.tolist() == [sum(sample.loss_mask) for sample in samples]
    assert table.has_unscored == any(sample.response_ids and sample.old_logprobs is None for sample in samples)


def test_optimizer_steps_are_distributed_separately() -> None:
    """A step has whole groups, all ranks have equally many microbatches, and microbatches respect the token budget."""
    samples = drawn(50, seed=1)
    _, share_builders = distribute(samples, minibatches=3, tokens_per_microbatch=120, dp=4)
    shares = [build_share() for build_share in share_builders]
    bounds = [0, 20, 36, 50]  # 13 groups of four, the last of two: five groups, and twice four
    for step in range(3):
        microbatch_lists = [share.minibatches[step] for share in shares]
        places = {int(share.indices[i]) for share, part in zip(shares, microbatch_lists, strict=True) for i in part.members}
        assert places == {i for i in range(bounds[step], bounds[step + 1]) if samples[i].response_ids}
        assert {part.trajectories for part in microbatch_lists} == {bounds[step + 1] - bounds[step]}
        assert len({len(part.microbatches) for part in microbatch_lists}) == 1
        for share, part in zip(shares, microbatch_lists, strict=True):
            assert sorted(chain.from_iterable(part.microbatches)) == list(range(len(part.members)))
            for micro in part.microbatches:
                lengths = [int(share.prompt_lengths[part.members[i]] + share.response_lengths[part.members[i]]) for i in micro]
                assert len(lengths) <= 1 or sum(lengths) <= 120


def forked(sizes: list[list[int]]) -> list[Sample]:
    """Groups of trajectories with these numbers of samples of three tokens."""
    share_builders = []
    for group, trajectories in enumerate(sizes):
        for index, count in enumerate(trajectories):
            for _ in range(count):
                sample = Sample(f"p{group}", str(group), [1, 2], index, reward=0.0)
                sample.append([3, 4, 5], [-1.0] * 3, 0)
                share_builders.append(sample)
    return share_builders


@pytest.mark.parametrize("dp", [1, 2, 5])
@pytest.mark.parametrize("minibatches", [1, 2, 4])
@pytest.mark.parametrize(
    "sizes",
    [
        [[1, 1], [1, 1], [1, 1], [1, 1]],
        [[1, 9], [1, 1], [7, 1], [1, 1]],
        [[5, 5], [1], [1, 1, 1], [2, 1]],
        [[1], [1], [1], [1], [13], [1, 1], [1]],
    ],
)
def test_update_has_the_recipes_number_of_optimizer_steps(sizes: list[list[int]], minibatches: int, dp: int) -> None:
    """Each has whole groups, for groups of any size and trajectories of several samples."""
    samples = forked(sizes)
    table, share_builders = distribute(samples, minibatches=minibatches, tokens_per_microbatch=16, dp=dp)
    shares = [build_share() for build_share in share_builders]
    assert {len(share.minibatches) for share in shares} == {minibatches}
    steps = [
        {samples[share.indices[i]].group_id for share in shares for i in share.minibatches[step].members} for step in range(minibatches)
    ]
    assert sum(map(len, steps)) == len(set.union(*steps)) == len(sizes), "no group is in two steps"
    assert max(map(len, steps)) - min(map(len, steps)) <= 1
    for step, groups in enumerate(steps):
        trajectories = sum(len(sizes[int(group)]) for group in groups)
        assert {share.minibatches[step].trajectories for share in shares} == {trajectories}
    for share in shares:
        counts = [sizes[int(samples[place].group_id)][samples[place].index] for place in share.indices]
        assert share.trajectory_tokens.tolist() == [3 * count for count in counts]
    assert len(table.rewards) == len(samples)


def test_step_without_a_sampled_token_is_dropped() -> None:
    """A step with tokens of an environment only is dropped; the other steps are unchanged."""
    samples = forked([[1, 1], [1, 1], [1, 1]])
    for sample in samples[2:4]:
        sample.loss_mask = mask_of([0, 0, 0])
    _, (build_share,) = distribute(samples, minibatches=3, tokens_per_microbatch=64, dp=1)
    share = build_share()
    assert [[int(share.indices[i]) for i in part.members] for part in share.minibatches] == [[0, 1], [4, 5]]


def test_empty_batch_has_no_optimizer_step() -> None:
    samples = [Sample("p", "g", [1], index, reward=0.0) for index in range(4)]
    table, share_builders = distribute(samples, minibatches=2, tokens_per_microbatch=8, dp=2)
    assert (
        all(build_share().minibatches == [] and build_share().sequences() == [] for build_share in share_builders)
        and not table.has_unscored
    )


def test_share_takes_at_most_sixteen_bytes_per_token() -> None:
    samples = [Sample(f"p{i}", str(i), [1] * 64, reward=0.0) for i in range(8)]
    for sample in samples:
        sample.append([1] * 960, [-1.0] * 960, 0)
        sample.old_logprobs, sample.old_version = sample.behaviour_logprobs, 0
    _, share_builders = distribute(samples, minibatches=1, tokens_per_microbatch=2048, dp=2)
    assert sum(len(pickle.dumps(build_share(), pickle.HIGHEST_PROTOCOL)) for build_share in share_builders) < 16 * 8 * 1024


@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
@pytest.mark.parametrize("column", ["behaviour_logprobs", "old_logprobs", "teacher_logprobs", "candidate_logprobs"])
def test_non_finite_logprob_of_a_trained_token_is_rejected_with_the_sample_name(column: str, value: float) -> None:
    samples = forked([[1, 1]])
    for sample in samples:
        sample.old_logprobs, sample.teacher_logprobs = sample.behaviour_logprobs[:], sample.behaviour_logprobs[:]
        sample.candidates, sample.candidate_logprobs = ids_of([1, 2] * 3), logprobs_of([-1.0] * 6)
    logprobs = getattr(samples[1], column)
    logprobs[-1] = value
    with pytest.raises(RuntimeFailure, match=rf"^sample p0/1: .* gave (a candidate of )?response token 2 the log-prob {value:g}"):
        distribute(samples, minibatches=1, tokens_per_microbatch=64, dp=1)
    samples[1].loss_mask = mask_of([1, 1, 0])
    distribute(samples, minibatches=1, tokens_per_microbatch=64, dp=1)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_reward_is_rejected(reward: float) -> None:
    samples = drawn(4)
    samples[2].reward = reward
    with pytest.raises(RuntimeFailure, match=r"p0: reward\.function returned -?(nan|inf); return finite numbers"):
        distribute(samples, minibatches=1, tokens_per_microbatch=64, dp=1)


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


class TestPartition:
    @given(LENGTHS, st.integers(1, 100), st.integers(1, 4))
    def test_every_sequence_is_assigned_once_and_ranks_have_equally_many_microbatches(self, lengths, budget, dp):
        microbatch_lists = partition(lengths, budget, dp)
        assert sorted(i for rank in microbatch_lists for micro in rank for i in micro) == list(range(len(lengths)))
        assert len({len(rank) for rank in microbatch_lists}) == 1

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
