"""Before and after: windows, changes, and figures that are no numbers."""

from __future__ import annotations

import math

import pytest

from mtpctl.telemetry.history import History, Row
from mtpctl.telemetry.names import describe
from mtpctl.telemetry.summary import SummaryRow, before_and_after, in_between


def history(name: str, values: list[float]) -> History:
    return History([Row("rl", step, 0.0, 1, {name: value}) for step, value in enumerate(values)], [])


def test_held_out_figures_are_single_ones_and_the_others_means_over_a_tenth() -> None:
    values = [float(i) for i in range(20)]
    assert before_and_after(history("eval/accuracy", values))[0].after == 19.0
    assert [(r.before, r.after) for r in before_and_after(history("reward/mean", values))] == [(0.5, 18.5)]


def test_held_out_accuracy_is_told_by_its_late_mean_too() -> None:
    """A run that swings may end high; the mean of its last evaluations does not."""
    rows = before_and_after(history("eval/accuracy", [0.45, 0.72, 0.43, 0.31, 0.49, 0.77]))
    assert [(r.metric.label, r.before, pytest.approx(r.after)) for r in rows] == [
        ("held-out accuracy", 0.45, 0.77),
        ("its last 4, mean", 0.45, 0.50),
    ]
    assert rows[1].change == "+5.0 points"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            [0.45, 0.72, 0.43, 0.31, 0.49, 0.77],
            "Held-out accuracy: best 77.0% at update 5; worst fall 41.0 points, from 72.0% at update 1 to 31.0% at update 3.",
        ),
        ([0.45, 0.5, 0.6], "Held-out accuracy: best 60.0% at update 2; no evaluation fell below an earlier one."),
        ([0.45, math.nan, 0.5, 0.6], "Held-out accuracy: best 60.0% at update 3; no evaluation fell below an earlier one."),
        ([0.45, 0.6], "Held-out accuracy was measured only before and after; set train.eval_every for evaluations in between."),
        ([0.45], ""),
    ],
)
def test_what_lay_in_between_in_a_sentence(values: list[float], told: str) -> None:
    assert in_between(history("eval/accuracy", values)) == told


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
