"""Axes of a chart, linear or logarithmic: ranges, ticks, and positions of values."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mtpctl.telemetry.names import Unit, compact


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values with the ticks in it."""

    low: float
    high: float
    ticks: list[float]
    log: bool = False

    def place(self, value: float) -> float:
        """Position of a value: 0 at the lower end, 1 at the upper end. Values beyond an end are put at it."""
        if self.log:
            low, high, value = math.log(self.low), math.log(self.high), math.log(max(value, self.low))
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low)))


def linear_axis(low: float, high: float, *, zero: bool = False, count: int = 4) -> Axis:
    """About `count` round ticks that enclose the range; with `zero`, from or to zero."""
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-12 * max(abs(low), abs(high)) or high - low < 1e-30:
        pad = abs(high) * 0.1 if abs(high) > 1e-30 else 1.0
        low, high = (0.0, high + pad) if zero and high >= 0 else (low - pad, high + pad)
    step = round_step((high - low) / count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [float(f"{i * step:.12g}") for i in range(first, last + 1)]
    return Axis(ticks[0], ticks[-1], ticks)


def log_axis(low: float, high: float) -> Axis:
    """Whole decades as ticks, or 1-2-5 where the range holds fewer than two. Both ends must be above zero."""
    decades = [10.0**e for e in range(math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9) + 1)]
    if len(decades) > 3:
        skip = math.ceil(len(decades) / 5)
        return Axis(decades[0], decades[-1], decades[::skip], log=True)
    steps = [m * d for d in decades for m in (1, 2, 5)]
    begin = max([s for s in steps if s <= low * (1 + 1e-9)], default=steps[0])
    end = min([s for s in [*steps, 10 * decades[-1]] if s >= high * (1 - 1e-9) and s > begin])
    return Axis(begin, end, [s for s in steps if begin <= s < end] + [end], log=True)


def round_step(raw: float) -> float:
    """The next 1, 2, 2.5 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(raw))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if raw <= m * power * (1 + 1e-9))


def tick_label(value: float, unit: Unit) -> str:
    """The label of a tick. Units other than per cent stand in the chart's title."""
    return f"{100 * value:g}%" if unit == "share" else compact(value)


def space_apart(wanted: list[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near the wanted ones, in the same order, at least `gap` apart, and between `low` and `high` where they all fit."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    places = [min(max(wanted[i], low), high) for i in order]
    for k in range(1, len(places)):
        places[k] = max(places[k], places[k - 1] + gap)
    if places and places[-1] > high:
        places[-1] = high
        for k in range(len(places) - 2, -1, -1):
            places[k] = min(places[k], places[k + 1] - gap)
    result = [0.0] * len(wanted)
    for k, i in enumerate(order):
        result[i] = places[k]
    return result
