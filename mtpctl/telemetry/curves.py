"""Measures of a learning curve: late mean, worst fall, area, and when it holds a level.

A curve is a sequence of (x, y) with increasing x: updates or seconds, and held-out accuracy, or another metric that rises when a run
learns. Its first point is from before training. Results have the units of the curve.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Point = tuple[float, float]
Curve = Sequence[Point]

LATE = 4
"""Evaluations at the end of a curve that count as late; their mean depends less on chance than the last one."""


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
class Measures:
    """The measures of one curve. `late_mean` is over `late` points; `worst_fall` is None for a curve that never falls."""

    start: float
    late_mean: float
    late: int
    best: Point
    worst_fall: Fall | None


def measure(curve: Curve) -> Measures | None:
    """The measures of a curve; None for one without a point after its start."""
    if len(curve) < 2:
        return None
    late = late_points(curve)
    return Measures(curve[0][1], late_mean(curve), len(late), max(curve, key=lambda point: point[1]), worst_fall(curve))


def late_points(curve: Curve, last: int = LATE) -> Curve:
    """The last few points, without the start unless it is the only point."""
    return (curve[1:] or curve)[-last:]


def late_mean(curve: Curve, last: int = LATE) -> float:
    """Mean height of the late points. Raises ValueError for a curve without a point."""
    late = late_points(curve, last)
    if not late:
        raise ValueError("a curve without a point has no late mean")
    return sum(y for _, y in late) / len(late)


def worst_fall(curve: Curve) -> Fall | None:
    """The largest drop of a point under the best one before it, however long before; None where the curve never falls."""
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


def height(curve: Curve, x: float) -> float:
    """The y of the curve at `x`, interpolated linearly; beyond its ends, that of the end.

    Raises ValueError for a curve without a point.
    """
    if not curve:
        raise ValueError("a curve without a point has no height")
    after = bisect_right(curve, x, key=lambda point: point[0])
    if after in (0, len(curve)):
        return curve[0][1] if after == 0 else curve[-1][1]
    (x0, y0), (x1, y1) = curve[after - 1], curve[after]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def area(curve: Curve, end: float | None = None) -> float:
    """Area under the lines between the points, from the first to `end` (default: the last), over that width: a mean height.

    Points need not be evenly spaced. Curves of unlike length compare over the `end` that all of them reach. Raises ValueError for a
    curve without a point.
    """
    stop = curve[-1][0] if end is None and curve else end
    if stop is None:
        raise ValueError("a curve without a point has no area")
    inside = [point for point in curve if point[0] < stop]
    if not inside:
        return height(curve, stop)
    inside.append((stop, height(curve, stop)))
    return sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in pairwise(inside)) / (stop - inside[0][0])


def held_at(curve: Curve, level: float, tolerance: float = 0.0) -> float | None:
    """The x at which the curve reaches `level` to hold it: no later point is below `level - tolerance`, and there is a later point.

    It is interpolated linearly between the points around it. None where the curve never reaches the level, or falls again each time.
    """
    for i, (x, y) in enumerate(curve[:-1]):
        if y >= level and all(later >= level - tolerance for _, later in curve[i + 1 :]):
            if i == 0:
                return x
            # Below the level, or it would hold already from the point before.
            x0, y0 = curve[i - 1]
            return x0 + (x - x0) * (level - y0) / (y - y0)
    return None


def mean_curve(curves: Sequence[Curve]) -> list[Point]:
    """Mean of several curves up to the end of the shortest, at the x of the first curve and at that end."""
    if not curves or not all(curves):
        return []
    end = min(curve[-1][0] for curve in curves)
    places = [x for x, _ in curves[0] if x < end] + [end]
    return [(x, sum(height(curve, x) for curve in curves) / len(curves)) for x in places]
