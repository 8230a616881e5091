"""DAPO's penalty for long responses, which the trainer adds to rewards. Needs no torch."""

from __future__ import annotations

from mtpctl.recipe.rl import OverlongConfig


def overlong_penalty(length: int, max_tokens: int, config: OverlongConfig) -> float:
    """The value from -penalty to 0 that is added to the reward of a response of `length` tokens.

    DAPO's soft overlong punishment (arXiv 2503.14476, equation 13): 0 up to max_tokens - buffer, and from there linear to -penalty at
    max_tokens.
    """
    if not config.enabled:
        return 0.0
    over = length - (max_tokens - config.buffer)
    return -config.penalty * min(max(over / config.buffer, 0.0), 1.0)
