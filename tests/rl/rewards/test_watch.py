"""Bounds beyond which a call is long, from the durations of recent calls."""

from __future__ import annotations

import pytest

from mtpctl.rl.rewards.watch import RecentDurations


def usual(*history: float, completed: int = 50) -> RecentDurations:
    durations = RecentDurations()
    for seconds in history:
        durations.add(seconds, seconds, completed)
    return durations


def test_cpu_bound_is_three_times_a_high_percentile() -> None:
    assert usual(*[0.01] * 60).max_cpu_seconds(50) == pytest.approx(0.03)
    assert usual(*[0.01] * 40, *[0.02] * 24).max_cpu_seconds(50) == pytest.approx(0.06)
    assert usual(*[0.0001] * 60).max_cpu_seconds(50) == pytest.approx(0.01), "the CPU clock has a resolution of milliseconds"


def test_cpu_bound_after_hung_calls_is_ten_times_the_median() -> None:
    assert usual(*[0.01] * 50, *[30.0] * 14).max_cpu_seconds(50) == pytest.approx(0.1), "ten times the median"


def test_first_calls_of_a_process_are_compared_with_first_calls_of_others() -> None:
    assert RecentDurations().max_cpu_seconds(0) == usual(*[0.01] * 60).max_cpu_seconds(0) == pytest.approx(0.25), "no history"
    assert usual(*[0.02] * 8, completed=0).max_cpu_seconds(0) == pytest.approx(0.06)
    assert usual(*[0.2] * 8, completed=0).max_cpu_seconds(0) == pytest.approx(0.25)


def test_time_bound_is_ten_times_the_median_and_larger_for_first_calls() -> None:
    assert usual(*[0.02] * 9).max_seconds(1) == pytest.approx(0.2)
    assert RecentDurations().max_seconds(0) > usual(0.001).max_seconds(0) > usual(0.001).max_seconds(1)
