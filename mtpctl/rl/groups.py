"""Which groups of responses to one prompt there is something to learn from. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

_EPS = 1e-6


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards differ at all: groups that do not are what DAPO's dynamic sampling replaces.

    DAPO (arXiv 2503.14476, section 3.2) asks for an accuracy strictly between 0 and 1: give rewards before shaping,
    or a group that is all wrong, but for its lengths, passes.
    """
    return len(rewards) > 1 and max(rewards) - min(rewards) > _EPS
