"""What a learning curve is worth between its two ends: late mean, worst fall, area, and the moment from which a level is held.

A curve is a sequence of (x, y) with growing x: updates or seconds, and a held-out accuracy, or whatever rises when a run learns. Its
first point is the start, before anything was learned. Everything here is arithmetic on such pairs, in their own units.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Point = tuple[float, float]
Curve = Sequence[Point]

LATE = 4
"""Evaluations at the end of a curve that count as late: enough that one lucky last one decides nothing."""


@dataclass(frozen=True, slots=True)
class Fall:
    """How far a curve came down: from `top`, its best until then, to `bottom`."""

    top: Point
    bottom: Point

    @property
    def size(self) -> float:
        """The drop, in the curve's own unit; above 0."""
        return self.top[1] - self.bottom[1]


@dataclass(frozen=True, slots=True)
class Measures:
    """A curve in figures. `late` of its points make `late_mean`; `worst_fall` is None where no point lies under one before it."""

    start: float
    late_mean: float
    late: int
    best: Point
    worst_fall: Fall | None


def measure(curve: Curve) -> Measures | None:
    """All of them; None for a curve that holds no point after its start."""
    if len(curve) < 2:
        return None
    late = late_points(curve)
    return Measures(curve[0][1], late_mean(curve), len(late), max(curve, key=lambda point: point[1]), worst_fall(curve))


def late_points(curve: Curve, last: int = LATE) -> Curve:
    """The last few points. The start is none of them, where there is any other."""
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
    """At each x the highest y until there."""
    result: list[Point] = []
    for x, y in curve:
        result.append((x, max(y, result[-1][1]) if result else y))
    return result


def height(curve: Curve, x: float) -> float:
    """The curve at `x`, on the line between the points around it; beyond its ends, the end.

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
    """The x from which on the curve holds `level`: there it reaches it, and no later point is below `level - tolerance`.

    The place is read off the line to the point that reaches it. The last point alone holds nothing: no later one says that it stayed.
    None where the curve never holds the level, whether it never got there or always came down again.
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
    """Mean height of several curves as far as all of them go, at the first one's places and at the end of the shortest."""
    if not curves or not all(curves):
        return []
    end = min(curve[-1][0] for curve in curves)
    places = [x for x, _ in curves[0] if x < end] + [end]
    return [(x, sum(height(curve, x) for curve in curves) / len(curves)) for x in places]
