"""Group advantages against values worked out by hand."""

from __future__ import annotations

import pytest
import torch

from mtpctl.rl.advantages import group_advantages
from mtpctl.rl.groups import has_signal

REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 3.0, 5.0])
GROUPS = torch.tensor([7, 7, 7, 7, 2, 2])
LENGTHS = torch.tensor([3, 1, 4, 1, 5, 2])
KINDS = ["grpo", "grpo_no_std", "rloo", "reinforce_pp", "reinforce_pp_baseline"]


def test_grpo() -> None:
    half = 0.5 / (1 / 3) ** 0.5
    root = 1 / 2**0.5
    expected = [half, -half, -half, half, -root, root]
    assert group_advantages(REWARDS, GROUPS, "grpo", LENGTHS).tolist() == pytest.approx(expected, abs=1e-5)


def test_grpo_without_std() -> None:
    assert group_advantages(REWARDS, GROUPS, "grpo_no_std", LENGTHS).tolist() == [0.5, -0.5, -0.5, 0.5, -1.0, 1.0]


def test_rloo_is_the_reward_less_the_mean_of_the_others() -> None:
    expected = []
    for i, group in enumerate(GROUPS):
        others = [REWARDS[j].item() for j in range(len(REWARDS)) if GROUPS[j] == group and j != i]
        expected.append(REWARDS[i].item() - sum(others) / len(others))
    assert group_advantages(REWARDS, GROUPS, "rloo", LENGTHS).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", ["grpo", "grpo_no_std", "rloo"])
def test_groups_without_signal_and_groups_of_one_get_nothing(kind: str) -> None:
    rewards = torch.tensor([0.7, 0.7, 0.7, 4.0])
    assert group_advantages(rewards, torch.tensor([0, 0, 0, 1]), kind, torch.ones(4)).abs().max() < 1e-9  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_order_does_not_matter(kind: str) -> None:
    torch.manual_seed(0)
    order = torch.randperm(6)
    straight = group_advantages(REWARDS, GROUPS, kind, LENGTHS)  # type: ignore[arg-type]
    mixed = group_advantages(REWARDS[order], GROUPS[order], kind, LENGTHS[order])  # type: ignore[arg-type]
    torch.testing.assert_close(mixed, straight[order], rtol=1e-6, atol=0)


def test_grpo_does_not_depend_on_the_rewards_scale_or_offset() -> None:
    torch.testing.assert_close(
        group_advantages(REWARDS * 10 - 3, GROUPS, "grpo", LENGTHS), group_advantages(REWARDS, GROUPS, "grpo", LENGTHS), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize(("kind", "means"), [("reinforce_pp", (0.0, 0.0)), ("reinforce_pp_baseline", (0.5, 4.0))])
def test_reinforce_pp_normalises_over_all_tokens_of_the_batch(kind: str, means: tuple[float, float]) -> None:
    """The paper's equation over a list that holds every token's value, one by one."""
    values = [
        reward - means[int(group == 2)]
        for reward, group, length in zip(REWARDS.tolist(), GROUPS.tolist(), LENGTHS.tolist(), strict=True)
        for _ in range(length)
    ]
    mean = sum(values) / len(values)
    std = (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5
    expected = [(reward - means[int(group == 2)] - mean) / std for reward, group in zip(REWARDS.tolist(), GROUPS.tolist(), strict=True)]
    found = group_advantages(REWARDS, GROUPS, kind, LENGTHS)  # type: ignore[arg-type]
    assert found.tolist() == pytest.approx(expected, abs=1e-5)
    assert (found * LENGTHS).sum().item() == pytest.approx(0.0, abs=1e-5)
    assert (found**2 * LENGTHS).sum().item() / LENGTHS.sum().item() == pytest.approx(1.0, abs=1e-5)


def test_reinforce_pp_learns_from_groups_of_one_and_from_groups_of_equal_rewards() -> None:
    rewards, groups = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0, 0, 1])
    found = group_advantages(rewards, groups, "reinforce_pp", torch.tensor([2, 2, 4]))
    assert found.tolist() == pytest.approx([1.0, 1.0, -1.0], abs=1e-5)


def test_a_response_without_a_token_does_not_move_the_batchs_mean() -> None:
    found = group_advantages(torch.tensor([1.0, 0.0, 9.0]), torch.tensor([0, 0, 0]), "reinforce_pp", torch.tensor([1, 1, 0]))
    assert found[:2].tolist() == pytest.approx([1.0, -1.0], abs=1e-5)


def test_a_batch_of_equal_rewards_teaches_nothing() -> None:
    for kind in KINDS:
        found = group_advantages(torch.full((4,), 0.1), torch.tensor([0, 0, 1, 1]), kind, torch.tensor([3, 7, 1, 1]))  # type: ignore[arg-type]
        assert found.abs().max() < 1e-6, kind


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_keep_float64_until_the_advantage(kind: str) -> None:
    small = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    groups, lengths = torch.tensor([0, 0, 1, 1]), torch.ones(4)
    expected = group_advantages(small, groups, kind, lengths)  # type: ignore[arg-type]
    assert expected.dtype == torch.float64
    torch.testing.assert_close(group_advantages(small + 1e8, groups, kind, lengths), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1e39, 1e200, 1e307])
@pytest.mark.parametrize("kind", ["grpo", "reinforce_pp", "reinforce_pp_baseline"])
def test_advantages_that_are_divided_by_the_deviation_do_not_depend_on_the_size_of_the_rewards(kind: str, size: float) -> None:
    rewards, groups, lengths = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([0, 0]), torch.tensor([2, 3])
    expected = group_advantages(rewards, groups, kind, lengths)  # type: ignore[arg-type]
    torch.testing.assert_close(group_advantages(rewards * size, groups, kind, lengths), expected, atol=1e-5, rtol=0)  # type: ignore[arg-type]


def test_signal() -> None:
    assert has_signal([0.0, 1.0, 0.0])
    assert not has_signal([1.0, 1.0, 1.0])
    assert not has_signal([0.1 + 0.2, 0.3])
    assert not has_signal([1.0])
