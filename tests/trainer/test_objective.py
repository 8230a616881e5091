"""Advantages of updates, one per trajectory, and the gain that a teacher adds to each token."""

from __future__ import annotations

import numpy as np
import pytest

from mtpctl.errors import RuntimeFailure
from mtpctl.recipe.rl import OverlongConfig, RlConfig, TeacherConfig
from mtpctl.samples import Sample, logprobs_of
from mtpctl.trainer.objective import estimate_advantages, training_sequence
from mtpctl.trainer.share import BatchTable
from tests.fakes.sequences import sequences_of


def sample(group: str, index: int, reward: float, tokens: int = 4) -> Sample:
    created = Sample("p", group, [1, 2], index)
    created.append(list(range(tokens)), [-1.0] * tokens, 0)
    created.reward, created.old_logprobs = reward, logprobs_of([-1.0] * tokens)
    return created


def gains(samples: list[Sample], **options: object) -> list[float]:
    return estimate_advantages(BatchTable.of(samples, 1), RlConfig.model_validate(options), max_tokens=16, context=64)


def test_large_rewards_keep_their_difference() -> None:
    assert gains([sample("g", 0, 1e8), sample("g", 1, 1e8 + 1)], advantage="grpo_no_std") == [-0.5, 0.5]
    assert gains([sample("g", 0, 1e39), sample("g", 1, 0.0)], advantage="grpo") == pytest.approx([0.5**0.5, -(0.5**0.5)])


def test_advantage_beyond_float32_is_rejected() -> None:
    with pytest.raises(
        RuntimeFailure, match=r"train\.rl\.advantage: rloo computes an advantage beyond the range of float32.*reward\.function"
    ):
        gains([sample("g", 0, 1e39), sample("g", 1, 0.0)], advantage="rloo")


@pytest.mark.parametrize("kind", ["grpo", "grpo_no_std", "rloo"])
def test_trajectory_of_several_samples_counts_once_in_its_group(kind: str) -> None:
    whole = [sample("g", 0, 1.0), sample("g", 1, 0.0), sample("g", 2, 0.0)]
    split = [sample("g", 0, 1.0), sample("g", 0, 1.0), sample("g", 0, 1.0), *whole[1:]]
    alone, together = gains(whole, advantage=kind), gains(split, advantage=kind)
    assert together == [alone[0]] * 3 + alone[1:]
    assert alone[0] > 0 > alone[1]


def test_batch_baseline_weighs_all_tokens_of_a_trajectory() -> None:
    alone = gains([sample("g", 0, 1.0, 8), sample("g", 1, 0.0, 4)], advantage="reinforce_pp")
    split = gains([sample("g", 0, 1.0, 3), sample("g", 0, 1.0, 5), sample("g", 1, 0.0, 4)], advantage="reinforce_pp")
    assert split == [alone[0], *alone]


def test_overlong_penalty_uses_the_longest_sample_of_a_trajectory() -> None:
    overlong = OverlongConfig(enabled=True, buffer=8, penalty=1.0)
    samples = [sample("g", 0, 1.0, 2), sample("g", 0, 1.0, 12), sample("g", 1, 1.0, 2)]
    first, second, other = gains(samples, overlong=overlong, advantage="grpo_no_std")
    assert first == second == pytest.approx(-0.25) and other == pytest.approx(0.25)


def test_equal_indices_of_two_groups_are_two_trajectories() -> None:
    assert gains([sample("g", 0, 1.0), sample("h", 0, 0.0), sample("g", 1, 0.0), sample("h", 1, 0.0)], advantage="grpo_no_std") == [
        0.5,
        0.0,
        -0.5,
        0.0,
    ]


def test_teacher_adds_its_gain_to_each_advantage() -> None:
    taught = sample("g", 0, 1.0, 2)
    taught.teacher_logprobs = logprobs_of([-0.5, -3.0])
    teacher = TeacherConfig(url="http://teacher", coef=2.0)
    assert np.allclose(
        training_sequence(*sequences_of([taught]), 0.5, teacher=teacher).columns["advantage"], [0.5 + 2 * 0.5, 0.5 - 2 * 2.0]
    )
    assert np.allclose(training_sequence(*sequences_of([taught]), 0.5).columns["advantage"], 0.5), "without a teacher"
