"""Measures of oscillating and rising curves, and the changes of metrics before and after RL."""

from __future__ import annotations

import math

import pytest

from mtpctl.telemetry.metrics_file import History, Row
from mtpctl.telemetry.names import describe
from mtpctl.telemetry.summary import (
    Fall,
    SummaryRow,
    before_and_after,
    best_so_far,
    evaluation_summary,
    interpolate,
    late_mean,
    mean_height,
    measure_curve,
    sustained_from,
    worst_fall,
)


def history(name: str, values: list[float]) -> History:
    return History([Row("rl", step, 0.0, 1, {name: value}) for step, value in enumerate(values)], [])


def test_held_out_figures_are_single_ones_and_the_others_means_over_a_tenth() -> None:
    values = [float(i) for i in range(20)]
    assert before_and_after(history("eval/accuracy", values))[0].after == 19.0
    assert [(r.before, r.after) for r in before_and_after(history("reward/mean", values))] == [(0.5, 18.5)]


def test_held_out_accuracy_has_late_mean() -> None:
    """A run that swings may end high; the mean of its last evaluations does not."""
    rows = before_and_after(history("eval/accuracy", [0.45, 0.72, 0.43, 0.31, 0.49, 0.77]))
    assert [(r.metric.label, r.before, pytest.approx(r.after)) for r in rows] == [
        ("held-out accuracy", 0.45, 0.77),
        ("its last 4, mean", 0.45, 0.50),
    ]
    assert rows[1].change == "+5.0 points"


@pytest.mark.parametrize(
    ("values", "message"),
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
def test_sentence_about_evaluations_in_between(values: list[float], message: str) -> None:
    assert evaluation_summary(history("eval/accuracy", values)) == message


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


EVERY = 4
SWINGING = "45 51 47 60 46 62 44 66 33 72 43 49 61 45 68 31 59 67 43 76 43"
RISING = "45 52 58 66 62 65 71 74 75 76 77 79 76 78 81 80 79 84 82 82 79"


def curve(text: str) -> list[tuple[float, float]]:
    """Accuracies in per cent, one every four updates."""
    return [(float(EVERY * i), float(value)) for i, value in enumerate(text.split())]


def test_the_late_mean_is_over_the_last_four() -> None:
    assert late_mean(curve(SWINGING)) == (67 + 43 + 76 + 43) / 4
    assert late_mean(curve(RISING)) == (84 + 82 + 82 + 79) / 4


def test_first_evaluation_counts_as_late_only_if_it_is_the_only_one() -> None:
    assert late_mean(curve("40 60 80")) == 70 and late_mean(curve("40")) == 40
    with pytest.raises(ValueError, match="an empty curve"):
        late_mean([])


def test_the_worst_fall_is_under_the_best_before_it() -> None:
    """And not under the neighbour: 68 → 31 is 37 points, yet 72 was reached before."""
    assert worst_fall(curve(SWINGING)) == Fall((36, 72), (60, 31))
    fall = worst_fall(curve(RISING))
    assert fall == Fall((68, 84), (80, 79)) and fall.size == 5
    assert worst_fall(curve("45 50 50 60")) is None and worst_fall(curve("45")) is None and worst_fall([]) is None


def test_a_slow_decline_is_as_deep_as_a_sudden_one() -> None:
    assert worst_fall(curve("80 78 76 74 72")) == Fall((0, 80), (16, 72))


def test_measures_differ_for_curves_with_equal_ends() -> None:
    """From its best, 76, the swinging run ends as high as the other one's middle; by its last point it learned nothing."""
    swinging, rising = measure_curve(curve(SWINGING)), measure_curve(curve(RISING))
    assert swinging is not None and rising is not None
    assert swinging.best == (76, 76) and swinging.late_mean == 57.25 and swinging.worst_fall and swinging.worst_fall.size == 41
    assert rising.best == (68, 84) and rising.late_mean == 81.75 and rising.start == 45 and rising.late_count == 4
    assert measure_curve(curve("45")) is None and measure_curve([]) is None


def test_level_is_sustained_from_its_last_crossing() -> None:
    """70 is crossed at the eighth evaluation and twice later by the run that swings, and held by the other one alone."""
    assert sustained_from(curve(SWINGING), 70) is None
    assert sustained_from(curve(RISING), 70) == pytest.approx(20 + 4 * (70 - 65) / (71 - 65))
    assert sustained_from(curve(RISING), 76) == 36


def test_crossing_followed_by_fall_does_not_count() -> None:
    points = curve("40 66 50 60 70 68 72")
    assert sustained_from(points, 65) == pytest.approx(12 + 4 * 0.5)
    assert sustained_from(points, 65, tolerance=15) == pytest.approx(4 * 25 / 26)


def test_up_to_a_tolerance() -> None:
    points = curve("40 70 68 72 69")
    assert sustained_from(points, 70) is None
    assert sustained_from(points, 70, tolerance=2) == 4
    assert sustained_from(points, 70, tolerance=1.9) == pytest.approx(8 + 4 * 2 / 4)


def test_last_point_alone_does_not_sustain_a_level() -> None:
    assert sustained_from(curve("45 50 60 76"), 70) is None
    assert sustained_from(curve("45 50 71 76"), 70) is not None
    assert sustained_from([], 70) is None


def test_curve_that_starts_above_level_holds_it_from_start() -> None:
    assert sustained_from(curve("45 50 60"), 40) == 0


def test_the_area_is_a_mean_height() -> None:
    assert mean_height(curve("50 50 50")) == 50
    assert mean_height([(0, 0.0), (10, 1.0)]) == 0.5
    assert mean_height([(0, 0.0), (2, 1.0), (10, 1.0)]) == pytest.approx(0.9), "points need not be evenly spaced"
    assert mean_height(curve(RISING)) > mean_height(curve(SWINGING)) + 15
    assert mean_height([(5, 0.7)]) == 0.7
    with pytest.raises(ValueError, match="an empty curve"):
        mean_height([])


def test_area_up_to_end_between_points() -> None:
    points = [(0.0, 0.0), (10.0, 1.0), (20.0, 1.0)]
    assert mean_height(points, 5) == pytest.approx(0.25)
    assert mean_height(points, 20) == mean_height(points) == pytest.approx(0.75)


def test_the_best_so_far_never_falls() -> None:
    assert [y for _, y in best_so_far(curve("45 51 47 60 46"))] == [45, 51, 51, 60, 60]


def test_curve_is_interpolated_between_points_and_constant_beyond_them() -> None:
    points = [(0.0, 0.2), (10.0, 0.4)]
    assert interpolate(points, 5) == pytest.approx(0.3) and interpolate(points, -1) == 0.2 and interpolate(points, 99) == 0.4
