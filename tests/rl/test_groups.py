"""Group statistics: learning signal, and pass@k against its definition, the share of subsets of k responses with a correct one."""

from __future__ import annotations

from itertools import combinations

import pytest

from mtpctl.rl.groups import has_signal, mean_pass_at_k, pass_at_k, pass_at_k_values


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_response(n: int) -> None:
    for correct in range(n + 1):
        responses = [number < correct for number in range(n)]
        for k in range(1, n + 1):
            subsets = list(combinations(responses, k))
            assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_of_large_counts_do_not_overflow() -> None:
    assert pass_at_k(10_000, 3, 1) == pytest.approx(3e-4)
    assert pass_at_k(10_000, 5_000, 64) == pytest.approx(1.0)


@pytest.mark.parametrize("k", [0, 5])
def test_k_beyond_the_responses_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} is undefined for 4 responses"):
        pass_at_k(4, 1, k)


def test_pass_at_k_is_reported_for_powers_of_two_and_n() -> None:
    assert [pass_at_k_values(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
    assert mean_pass_at_k([0, 4], 4) == {1: 0.5, 2: 0.5, 4: 0.5}


def test_group_has_signal_if_rewards_differ() -> None:
    assert has_signal([0.0, 1.0, 0.0])
    assert not has_signal([1.0, 1.0, 1.0])
    assert not has_signal([0.1 + 0.2, 0.3])
    assert not has_signal([1.0])
