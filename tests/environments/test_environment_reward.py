"""An environment's own reward as the reward of its response."""

from __future__ import annotations

import pytest

from mtpctl.environments.built_in import environment_reward
from mtpctl.samples import EnvironmentUse, Sample


def sample(reward: float | None, **use: int) -> Sample:
    return Sample("p", "g", [1], environment=EnvironmentUse(**use), environment_reward=reward)


def test_environment_reward_is_used_and_is_zero_after_a_failure() -> None:
    assert environment_reward("", None, sample(0.75)) == {"reward": 0.75}
    assert environment_reward("", None, sample(None, errors=1)) == environment_reward("", None, sample(None, timeouts=1)) == 0.0


def test_environment_without_a_reward_raises() -> None:
    with pytest.raises(ValueError, match=r"have its `reward\(\)`"):
        environment_reward("", None, sample(None, turns=2))


def test_agents_reward_parts_are_included() -> None:
    inputs = sample(0.75)
    inputs.reward_parts = {"calls": 2.0}
    assert environment_reward("", None, inputs) == {"reward": 0.75, "calls": 2.0}
