"""Which groups of responses give a learning signal. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

_EPS = 1e-6


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group differ. Dynamic sampling replaces groups whose rewards do not.

    DAPO (arXiv 2503.14476, section 3.2) requires an accuracy strictly between 0 and 1. Pass rewards from before the overlong penalty,
    which would make the rewards of a group of wrong responses differ by their lengths.
    """
    return len(rewards) > 1 and max(rewards) - min(rewards) > _EPS
