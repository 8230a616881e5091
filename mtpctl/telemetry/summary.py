"""Measures of learning curves, and the summary of a run: its headline metrics before and after RL.

A curve is a sequence of (x, y) with increasing x. x is the number of updates or seconds; y is the held-out accuracy, or another metric that
rises as a run learns. The first point is from before training. Results have the units of the curve.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.table import Table

from mtpctl.telemetry.metrics_file import History
from mtpctl.telemetry.names import Metric, describe, format_value

Point = tuple[float, float]
Curve = Sequence[Point]

LATE_EVALUATIONS = 4
"""Number of last evaluations whose mean is the late mean, which is less noisy than the last evaluation."""


@dataclass(frozen=True, slots=True)
class Fall:
    """A drop of a curve from `top`, its best point so far, to `bottom`."""

    top: Point
    bottom: Point

    @property
    def size(self) -> float:
        """The drop, in the curve's own unit; above 0."""
        return self.top[1] - self.bottom[1]


@dataclass(frozen=True, slots=True)
class CurveMeasures:
    """Measures of one curve. `late_mean` is the mean of the last `late_count` points; `worst_fall` is None for a curve that never falls."""

    start: float
    late_mean: float
    late_count: int
    best: Point
    worst_fall: Fall | None


def measure_curve(curve: Curve) -> CurveMeasures | None:
    """The measures of a curve; None if it has no point after its start."""
    if len(curve) < 2:
        return None
    late = late_points(curve)
    return CurveMeasures(curve[0][1], late_mean(curve), len(late), max(curve, key=lambda point: point[1]), worst_fall(curve))


def late_points(curve: Curve) -> Curve:
    """The last few points, without the start unless it is the only point."""
    return (curve[1:] or curve)[-LATE_EVALUATIONS:]


def late_mean(curve: Curve) -> float:
    """Mean of the late points. Raises ValueError for an empty curve."""
    late = late_points(curve)
    if not late:
        raise ValueError("an empty curve has no late mean")
    return sum(y for _, y in late) / len(late)


def worst_fall(curve: Curve) -> Fall | None:
    """The largest drop of a point below the best earlier one; None if the curve never falls."""
    worst: Fall | None = None
    for (_, y0), (x, y) in zip(best_so_far(curve), curve[1:], strict=False):
        if y < y0 and (worst is None or y0 - y > worst.size):
            top = next(point for point in curve if point[1] == y0)
            worst = Fall(top, (x, y))
    return worst


def best_so_far(curve: Curve) -> list[Point]:
    """The curve of the highest y up to each x."""
    result: list[Point] = []
    for x, y in curve:
        result.append((x, max(y, result[-1][1]) if result else y))
    return result


def interpolate(curve: Curve, x: float) -> float:
    """The y of the curve at `x`, interpolated linearly and constant beyond its ends. Raises ValueError for an empty curve."""
    if not curve:
        raise ValueError("an empty curve has no height")
    index = bisect_right(curve, x, key=lambda point: point[0])
    if index in (0, len(curve)):
        return curve[0][1] if index == 0 else curve[-1][1]
    (x0, y0), (x1, y1) = curve[index - 1], curve[index]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def mean_height(curve: Curve, end: float | None = None) -> float:
    """Mean height: the area under the curve from its first point to `end` (default: the last point), divided by the width.

    To compare curves of different lengths, use an `end` that all of them reach. Raises ValueError for an empty curve.
    """
    if not curve:
        raise ValueError("an empty curve has no area")
    stop = curve[-1][0] if end is None else end
    points = [point for point in curve if point[0] < stop]
    if not points:
        return interpolate(curve, stop)
    points.append((stop, interpolate(curve, stop)))
    return sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in pairwise(points)) / (stop - points[0][0])


def sustained_from(curve: Curve, level: float, tolerance: float = 0.0) -> float | None:
    """The x at which the curve reaches `level` and holds it: there are later points, and none is below `level - tolerance`.

    Interpolated linearly. None if the curve never reaches the level, or always falls again.
    """
    for i, (x, y) in enumerate(curve[:-1]):
        if y >= level and all(later >= level - tolerance for _, later in curve[i + 1 :]):
            if i == 0:
                return x
            # The previous point is below the level; otherwise the curve would hold from there.
            x0, y0 = curve[i - 1]
            return x0 + (x - x0) * (level - y0) / (y - y0)
    return None


HEADLINES = (
    "eval/accuracy",
    "eval/unseen_accuracy",
    "reward/mean",
    "reward/unfiltered_mean",
    "rollout/spec_accept_rate",
    "rollout/spec_accept_length",
    "actor/entropy",
    "response/length_mean",
    "rollout/tokens_per_s",
    "perf/tokens_per_s",
)

_UNAVERAGED = {"eval/accuracy", "eval/unseen_accuracy"}
"""Metrics whose first and last values are compared, because each is a mean over a held-out set. For other metrics, the means of the first
and last tenth of the values are compared."""


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """One metric at the beginning and at the end of RL."""

    name: str
    metric: Metric
    before: float
    after: float

    @property
    def change(self) -> str:
        """The difference: in points for shares, else relative if `before` is positive, else absolute; a dash if one side is not finite."""
        if not (math.isfinite(self.before) and math.isfinite(self.after)):
            return "–"
        if self.metric.unit == "share":
            return f"{100 * (self.after - self.before):+.1f} points"
        if self.before <= 0:
            return f"{self.after - self.before:+.3g}"
        percent = round(100 * (self.after / self.before - 1))
        return f"{percent:+d}%" if percent else "±0%"


def before_and_after(history: History) -> list[SummaryRow]:
    """The headline metrics before and after RL, without those that were logged less than twice.

    If held-out accuracy was measured during RL, it has a second row: from the first evaluation to the mean of the late ones, which is less
    noisy than the last one.
    """
    rows = []
    for name in HEADLINES:
        values = [value for _, value in history.series(name, "rl")]
        if len(values) < 2:
            continue
        window = 1 if name in _UNAVERAGED else max(1, len(values) // 10)
        rows.append(SummaryRow(name, describe(name), sum(values[:window]) / window, sum(values[-window:]) / window))
        if name == "eval/accuracy" and (measures := measure_curve(evaluations(history))) and measures.late_count > 1:
            late = Metric(
                f"its last {measures.late_count}, mean", "share", f"Held-out accuracy, mean of the last {measures.late_count} evaluations."
            )
            rows.append(SummaryRow(name, late, measures.start, measures.late_mean))
    return rows


def evaluations(history: History) -> list[tuple[float, float]]:
    """(update, held-out accuracy) of every evaluation of RL with a finite accuracy."""
    return [(float(step), value) for step, value in history.series("eval/accuracy", "rl") if math.isfinite(value)]


def evaluation_summary(history: History) -> str:
    """A sentence about the best evaluation and the worst fall; empty for fewer than two evaluations. For exactly two, a hint instead."""
    measures = measure_curve(evaluations(history))
    if measures is None:
        return ""
    if measures.late_count == 1:
        return "Held-out accuracy was measured only before and after; set train.eval_every for evaluations in between."
    (step, best), fall = measures.best, measures.worst_fall
    start = f"Held-out accuracy: best {_accuracy(best)} at update {step:g}"
    if fall is None:
        return f"{start}; no evaluation fell below an earlier one."
    (x0, y0), (x, y) = fall.top, fall.bottom
    return f"{start}; worst fall {100 * fall.size:.1f} points, from {_accuracy(y0)} at update {x0:g} to {_accuracy(y)} at update {x:g}."


def summary_table(rows: list[SummaryRow]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("")
    for heading in ("before RL", "after RL", "change"):
        table.add_column(heading, justify="right")
    for row in rows:
        unit = row.metric.unit
        label = {"rollout/tokens_per_s": "rollout speed", "perf/tokens_per_s": "trainer speed"}.get(row.name, row.metric.label)
        table.add_row(label, format_value(row.before, unit), f"[bold]{format_value(row.after, unit)}[/]", row.change)
    return table


def _accuracy(value: float) -> str:
    return format_value(value, "share")
