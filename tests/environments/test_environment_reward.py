"""An environment's own reward as the reward of its response."""

from __future__ import annotations

import pytest

from mtpctl.environments.environment_reward import score
from mtpctl.samples import EnvironmentUse, Sample


def sample(reward: float | None, **use: int) -> Sample:
    return Sample("p", "g", [1], environment=EnvironmentUse(**use), environment_reward=reward)


def test_what_it_gave_is_the_reward_and_a_response_that_it_failed_in_has_none() -> None:
    assert score("", None, sample(0.75)) == {"reward": 0.75}
    assert score("", None, sample(None, errors=1)) == score("", None, sample(None, timeouts=1)) == 0.0


def test_an_environment_without_a_reward_is_told() -> None:
    with pytest.raises(ValueError, match=r"have its `reward\(\)`"):
        score("", None, sample(None, turns=2))


def test_the_parts_that_an_agent_returned_go_with_its_reward() -> None:
    given = sample(0.75)
    given.reward_parts = {"calls": 2.0}
    assert score("", None, given) == {"reward": 0.75, "calls": 2.0}
