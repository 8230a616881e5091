"""The reward function `environment`: what the environment's own `reward()`, or the agent, returned when the response ended."""

from __future__ import annotations

from mtpctl.samples import Sample


def score(response: str, problem: object, sample: Sample) -> float | dict[str, float]:
    """The environment's reward with its parts; 0 where the environment failed or was cut. Raises ValueError where it gives none."""
    if sample.environment_reward is not None:
        return {"reward": sample.environment_reward, **sample.reward_parts}
    use = sample.environment
    if use is None or use.errors or use.timeouts:  # None: a row on which the function is tried before there are responses
        return 0.0
    raise ValueError("the environment gives no reward; have its `reward()` return a number, or name another reward.function")
