"""DAPO's penalty for long responses."""

from __future__ import annotations

from mtpctl.recipe.rl import OverlongConfig
from mtpctl.rl.overlong import overlong_penalty


def test_overlong() -> None:
    config = OverlongConfig(enabled=True, buffer=20, penalty=2.0)
    lengths = [0, 80, 85, 90, 100, 120]
    assert [overlong_penalty(n, 100, config) for n in lengths] == [0.0, 0.0, -0.5, -1.0, -2.0, -2.0]
    assert overlong_penalty(100, 100, OverlongConfig(enabled=False)) == 0.0
