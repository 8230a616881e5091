"""Group advantages against values worked out by hand."""

from __future__ import annotations

import pytest
import torch

from mtpctl.rl.advantages import group_advantages
from mtpctl.rl.groups import has_signal

REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 3.0, 5.0])
GROUPS = torch.tensor([7, 7, 7, 7, 2, 2])


def test_grpo() -> None:
    half = 0.5 / (1 / 3) ** 0.5
    root = 1 / 2**0.5
    expected = [half, -half, -half, half, -root, root]
    assert group_advantages(REWARDS, GROUPS, "grpo").tolist() == pytest.approx(expected, abs=1e-5)


def test_grpo_without_std() -> None:
    assert group_advantages(REWARDS, GROUPS, "grpo_no_std").tolist() == [0.5, -0.5, -0.5, 0.5, -1.0, 1.0]


def test_rloo_is_the_reward_less_the_mean_of_the_others() -> None:
    expected = []
    for i, group in enumerate(GROUPS):
        others = [REWARDS[j].item() for j in range(len(REWARDS)) if GROUPS[j] == group and j != i]
        expected.append(REWARDS[i].item() - sum(others) / len(others))
    assert group_advantages(REWARDS, GROUPS, "rloo").tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", ["grpo", "grpo_no_std", "rloo"])
def test_groups_without_signal_and_groups_of_one_get_nothing(kind: str) -> None:
    rewards = torch.tensor([0.7, 0.7, 0.7, 4.0])
    assert group_advantages(rewards, torch.tensor([0, 0, 0, 1]), kind).abs().max() < 1e-9  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["grpo", "grpo_no_std", "rloo"])
def test_order_does_not_matter(kind: str) -> None:
    torch.manual_seed(0)
    order = torch.randperm(6)
    straight = group_advantages(REWARDS, GROUPS, kind)  # type: ignore[arg-type]
    assert torch.equal(group_advantages(REWARDS[order], GROUPS[order], kind), straight[order])  # type: ignore[arg-type]


def test_grpo_does_not_depend_on_the_rewards_scale_or_offset() -> None:
    torch.testing.assert_close(
        group_advantages(REWARDS * 10 - 3, GROUPS, "grpo"), group_advantages(REWARDS, GROUPS, "grpo"), atol=1e-5, rtol=0
    )


def test_signal() -> None:
    assert has_signal([0.0, 1.0, 0.0])
    assert not has_signal([1.0, 1.0, 1.0])
    assert not has_signal([0.1 + 0.2, 0.3])
    assert not has_signal([1.0])
