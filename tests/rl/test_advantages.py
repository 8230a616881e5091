"""Group advantages against hand-computed values."""

from __future__ import annotations

import pytest
import torch

from mtpctl.recipe.rl import ADVANTAGES, OverlongConfig
from mtpctl.rl.advantages import group_advantages, overlong_penalty

REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 3.0, 5.0])
GROUPS = torch.tensor([7, 7, 7, 7, 2, 2])
LENGTHS = torch.tensor([3, 1, 4, 1, 5, 2])


def test_grpo_divides_by_the_sample_deviation() -> None:
    half = 0.5 / (1 / 3) ** 0.5
    root = 1 / 2**0.5
    expected = [half, -half, -half, half, -root, root]
    assert group_advantages(REWARDS, GROUPS, "grpo", LENGTHS).tolist() == pytest.approx(expected, abs=1e-5)


def test_grpo_no_std_is_the_reward_minus_the_mean() -> None:
    assert group_advantages(REWARDS, GROUPS, "grpo_no_std", LENGTHS).tolist() == [0.5, -0.5, -0.5, 0.5, -1.0, 1.0]


def test_rloo_is_the_reward_minus_the_mean_of_the_others() -> None:
    expected = []
    for i, group in enumerate(GROUPS):
        others = [REWARDS[j].item() for j in range(len(REWARDS)) if GROUPS[j] == group and j != i]
        expected.append(REWARDS[i].item() - sum(others) / len(others))
    assert group_advantages(REWARDS, GROUPS, "rloo", LENGTHS).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", ["grpo", "grpo_no_std", "rloo"])
def test_groups_of_equal_rewards_or_of_one_response_have_advantage_zero(kind: str) -> None:
    rewards = torch.tensor([0.7, 0.7, 0.7, 4.0])
    assert group_advantages(rewards, torch.tensor([0, 0, 0, 1]), kind, torch.ones(4)).abs().max() < 1e-9


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_advantages_do_not_depend_on_the_order(kind: str) -> None:
    torch.manual_seed(0)
    order = torch.randperm(6)
    straight = group_advantages(REWARDS, GROUPS, kind, LENGTHS)
    mixed = group_advantages(REWARDS[order], GROUPS[order], kind, LENGTHS[order])
    torch.testing.assert_close(mixed, straight[order], rtol=1e-6, atol=0)


def test_grpo_is_invariant_to_scale_and_offset() -> None:
    torch.testing.assert_close(
        group_advantages(REWARDS * 10 - 3, GROUPS, "grpo", LENGTHS), group_advantages(REWARDS, GROUPS, "grpo", LENGTHS), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize(("kind", "means"), [("reinforce_pp", (0.0, 0.0)), ("reinforce_pp_baseline", (0.5, 4.0))])
def test_reinforce_pp_normalizes_over_all_tokens_of_the_batch(kind: str, means: tuple[float, float]) -> None:
    """The paper's equation over a list that holds every token's value, one by one."""
    values = [
        reward - means[int(group == 2)]
        for reward, group, length in zip(REWARDS.tolist(), GROUPS.tolist(), LENGTHS.tolist(), strict=True)
        for _ in range(length)
    ]
    mean = sum(values) / len(values)
    std = (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5
    expected = [(reward - means[int(group == 2)] - mean) / std for reward, group in zip(REWARDS.tolist(), GROUPS.tolist(), strict=True)]
    advantages = group_advantages(REWARDS, GROUPS, kind, LENGTHS)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-5)
    assert (advantages * LENGTHS).sum().item() == pytest.approx(0.0, abs=1e-5)
    assert (advantages**2 * LENGTHS).sum().item() / LENGTHS.sum().item() == pytest.approx(1.0, abs=1e-5)


def test_reinforce_pp_learns_from_groups_of_one_and_from_groups_of_equal_rewards() -> None:
    rewards, groups = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0, 0, 1])
    advantages = group_advantages(rewards, groups, "reinforce_pp", torch.tensor([2, 2, 4]))
    assert advantages.tolist() == pytest.approx([1.0, 1.0, -1.0], abs=1e-5)


def test_response_without_tokens_does_not_change_the_batch_mean() -> None:
    advantages = group_advantages(torch.tensor([1.0, 0.0, 9.0]), torch.tensor([0, 0, 0]), "reinforce_pp", torch.tensor([1, 1, 0]))
    assert advantages[:2].tolist() == pytest.approx([1.0, -1.0], abs=1e-5)


def test_batch_of_equal_rewards_has_advantage_zero() -> None:
    for kind in ADVANTAGES:
        advantages = group_advantages(torch.full((4,), 0.1), torch.tensor([0, 0, 1, 1]), kind, torch.tensor([3, 7, 1, 1]))
        assert advantages.abs().max() < 1e-6, kind


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_advantages_are_computed_in_float64(kind: str) -> None:
    small = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    groups, lengths = torch.tensor([0, 0, 1, 1]), torch.ones(4)
    expected = group_advantages(small, groups, kind, lengths)
    assert expected.dtype == torch.float64
    torch.testing.assert_close(group_advantages(small + 1e8, groups, kind, lengths), expected)


@pytest.mark.parametrize("size", [1e39, 1e200, 1e307])
@pytest.mark.parametrize("kind", ["grpo", "reinforce_pp", "reinforce_pp_baseline"])
def test_normalized_advantages_of_huge_rewards_do_not_overflow(kind: str, size: float) -> None:
    rewards, groups, lengths = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([0, 0]), torch.tensor([2, 3])
    expected = group_advantages(rewards, groups, kind, lengths)
    torch.testing.assert_close(group_advantages(rewards * size, groups, kind, lengths), expected, atol=1e-5, rtol=0)


def test_overlong_penalty_is_linear_over_the_buffer() -> None:
    config = OverlongConfig(enabled=True, buffer=20, penalty=2.0)
    lengths = [0, 80, 85, 90, 100, 120]
    assert [overlong_penalty(n, 100, config) for n in lengths] == [0.0, 0.0, -0.5, -1.0, -2.0, -2.0]
    assert overlong_penalty(100, 100, OverlongConfig(enabled=False)) == 0.0
