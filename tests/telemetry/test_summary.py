"""Before and after: windows, changes, and figures that are no numbers."""

from __future__ import annotations

import math

import pytest

from mtpctl.telemetry import SummaryRow, before_and_after, describe
from mtpctl.telemetry.history import History, Row


def history(name: str, values: list[float]) -> History:
    return History([Row("rl", step, 0.0, 1, {name: value}) for step, value in enumerate(values)], [])


def test_held_out_figures_are_single_ones_and_the_others_means_over_a_tenth() -> None:
    values = [float(i) for i in range(20)]
    assert [(r.before, r.after) for r in before_and_after(history("eval/accuracy", values))] == [(0.0, 19.0)]
    assert [(r.before, r.after) for r in before_and_after(history("reward/mean", values))] == [(0.5, 18.5)]


def test_a_metric_of_one_step_has_no_before_and_after() -> None:
    assert before_and_after(history("reward/mean", [1.0])) == []


@pytest.mark.parametrize(
    ("name", "before", "after", "change"),
    [
        ("eval/accuracy", 0.25, 0.75, "+50.0 points"),
        ("actor/entropy", 0.5, 0.25, "-50%"),
        ("actor/entropy", 0.5, 0.5, "±0%"),
        ("reward/mean", -0.5, 0.25, "+0.75"),
        ("actor/entropy", 0.5, math.nan, "–"),
        ("actor/entropy", math.nan, 0.5, "–"),
        ("actor/entropy", 0.5, math.inf, "–"),
        ("eval/accuracy", math.nan, 0.5, "–"),
    ],
)
def test_the_change_in_points_for_shares_and_else_relative(name: str, before: float, after: float, change: str) -> None:
    assert SummaryRow(name, describe(name), before, after).change == change
