"""Times of a run while the clock of the machine is set."""

from __future__ import annotations

import time

import pytest

from mtpctl.telemetry.runs import steady_clock


@pytest.mark.parametrize("jump", [-86400.0, 3600.0])
def test_adjusting_the_clock_does_not_change_elapsed_time(monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    wall, monotonic = [1000.0], [5.0]
    monkeypatch.setattr(time, "time", lambda: wall[0])
    monkeypatch.setattr(time, "monotonic", lambda: monotonic[0])
    now = steady_clock()
    assert now() == 1000.0
    monotonic[0] += 7
    wall[0] += 7 + jump
    assert now() == 1007.0
