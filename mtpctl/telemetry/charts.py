"""Charts and pages as HTML with inline styles, without scripts.

The lines of a chart are an SVG that scales with the page; the text is HTML, which does not scale. Each series has a label with its last
value at its right end. A long series is drawn twice: raw (faint) and as a moving average. Hovering over a step shows its values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean
from typing import Literal

from mtpctl.errors import UserError
from mtpctl.telemetry.names import Unit, compact, format_value
from mtpctl.telemetry.run_directory import write_atomically
from mtpctl.telemetry.sample_log import evenly_spaced


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values with the ticks in it."""

    low: float
    high: float
    ticks: list[float]
    log: bool = False

    def position(self, value: float) -> float:
        """Position of a value: 0 at the lower end, 1 at the upper end. Values outside are clipped."""
        if self.log:
            low, high, value = math.log(self.low), math.log(self.high), math.log(max(value, self.low))
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low)))


def linear_axis(low: float, high: float, *, include_zero: bool = False, count: int = 4) -> Axis:
    """An axis with about `count` round ticks that include the range; with `include_zero`, also zero."""
    if include_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-12 * max(abs(low), abs(high)) or high - low < 1e-30:
        pad = abs(high) * 0.1 if abs(high) > 1e-30 else 1.0
        low, high = (0.0, high + pad) if include_zero and high >= 0 else (low - pad, high + pad)
    step = round_step((high - low) / count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [float(f"{i * step:.12g}") for i in range(first, last + 1)]
    return Axis(ticks[0], ticks[-1], ticks)


def log_axis(low: float, high: float) -> Axis:
    """An axis with decades as ticks, or 1-2-5 steps if the enclosing decades span at most two. Both ends must be positive."""
    decades = [10.0**e for e in range(math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9) + 1)]
    if len(decades) > 3:
        skip = math.ceil(len(decades) / 5)
        return Axis(decades[0], decades[-1], decades[::skip], log=True)
    steps = [m * d for d in decades for m in (1, 2, 5)]
    begin = max([s for s in steps if s <= low * (1 + 1e-9)], default=steps[0])
    end = min([s for s in [*steps, 10 * decades[-1]] if s >= high * (1 - 1e-9) and s > begin])
    return Axis(begin, end, [s for s in steps if begin <= s < end] + [end], log=True)


def round_step(raw: float) -> float:
    """The smallest number of at least `raw` that is 1, 2, 2.5 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(raw))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if raw <= m * power * (1 + 1e-9))


def tick_label(value: float, unit: Unit) -> str:
    """The label of a tick. Units other than percent are in the chart's title."""
    return f"{100 * value:g}%" if unit == "share" else compact(value)


def space_apart(targets: list[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near the targets, in the same order, at least `gap` apart, and between `low` and `high` if they all fit."""
    order = sorted(range(len(targets)), key=lambda i: targets[i])
    positions = [min(max(targets[i], low), high) for i in order]
    for k in range(1, len(positions)):
        positions[k] = max(positions[k], positions[k - 1] + gap)
    if positions and positions[-1] > high:
        positions[-1] = high
        for k in range(len(positions) - 2, -1, -1):
            positions[k] = min(positions[k], positions[k + 1] - gap)
    result = [0.0] * len(targets)
    for k, i in enumerate(order):
        result[i] = positions[k]
    return result


Points = list[tuple[float, float]]

HEIGHT = 190
"""Height of the drawing in pixels; its width follows the page."""
_WIDTH = 1000
_MIN_SMOOTHED_POINTS = 40
_MAX_POINTS = 400
_MAX_HOVER_STRIPS = 100
NUM_COLORS = 7


@dataclass(frozen=True, slots=True)
class Series:
    """One curve of a chart.

    Attributes:
        dots: draw a dot at each point and no average, for metrics with few points.
        color: index of a color; by default the position of the curve.
        style: a `guide` is a dashed reference line, which is not averaged.
    """

    label: str
    points: Points
    unit: Unit = "number"
    dots: bool = False
    color: int | None = None
    style: Literal["curve", "guide"] = "curve"


@dataclass(frozen=True, slots=True)
class Phase:
    """The part (begin, end] of the x axis that belongs to one phase; `offset` is added to the phase's steps."""

    name: str
    begin: float
    end: float
    offset: float


@dataclass(frozen=True, slots=True)
class Chart:
    """The content of a chart. In a `stack`, the series are parts of a whole with equal steps."""

    title: str
    note: str
    series: Sequence[Series]
    phases: Sequence[Phase]
    scale: Literal["linear", "log"] = "linear"
    from_zero: bool = False
    stack: bool = False


def render_chart(chart: Chart) -> str:
    """The chart as a `<figure>`; empty if no series has a point that can be drawn."""
    curves = [
        ((i if s.color is None else s.color) % NUM_COLORS, s, pts)
        for i, s in enumerate(chart.series)
        if (pts := [(x, y) for x, y in s.points if math.isfinite(y) and (chart.scale != "log" or y > 0)])
    ]
    if not curves:
        return ""
    layers = _stack_layers([pts for _, _, pts in curves]) if chart.stack else [pts for _, _, pts in curves]
    xs = [x for pts in layers for x, _ in pts]
    values = [y for pts in layers for _, y in pts]
    x_axis = Axis(min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1, [])
    y_axis = (
        # From the minimum of the smoothed curves: one outlier near zero would stretch the axis over many decades.
        log_axis(min(y for _, series, pts in curves for _, y in (pts if series.dots else _smooth(pts))), max(values))
        if chart.scale == "log"
        else linear_axis(min(values), max(values), include_zero=chart.from_zero or chart.stack)
    )
    unit = curves[0][1].unit
    phases = [phase for phase in chart.phases if phase.end >= x_axis.low and phase.begin < x_axis.high]
    shapes = [_bands(phases, x_axis), *(f'<path class="grid" d="M0,{_y(t, y_axis):.1f}H{_WIDTH}"/>' for t in y_axis.ticks)]
    dots: list[str] = []
    label_positions: list[tuple[int, Series, float, float]] = []
    for k, (color, series, pts) in enumerate(curves):
        if chart.stack:
            lower_edge = layers[k - 1] if k else [(x, 0.0) for x, _ in pts]
            outline = _path(layers[k], x_axis, y_axis) + "L" + _path(lower_edge[::-1], x_axis, y_axis)[1:] + "Z"
            shapes.append(f'<path class="fill k{color}" d="{outline}"/>')
            middle = (_y(layers[k][-1][1], y_axis) + _y(lower_edge[-1][1], y_axis)) / 2
            label_positions.append((color, series, middle, layers[k][-1][1] - lower_edge[-1][1]))
            continue
        if series.style == "guide":
            shapes.append(f'<path class="guide k{color}" d="{_path(pts, x_axis, y_axis)}"/>')
            label_positions.append((color, series, _y(pts[-1][1], y_axis), pts[-1][1]))
            continue
        for piece in _split_by_phase(pts, phases):
            smooth = piece if series.dots else _smooth(piece)
            if smooth is not piece:
                shapes.append(f'<path class="raw k{color}" d="{_path(downsample(piece, _MAX_POINTS), x_axis, y_axis)}"/>')
            shapes.append(f'<path class="line k{color}" d="{_path(downsample(smooth, _MAX_POINTS), x_axis, y_axis)}"/>')
        dots += [_dot(x, y, color, x_axis, y_axis) for x, y in (pts if series.dots else smooth[-1:])]
        label_positions.append((color, series, _y(smooth[-1][1], y_axis), smooth[-1][1]))
    gap = 17.0 if chart.stack else 33.0
    positions = space_apart([end for _, _, end, _ in label_positions], gap, gap / 2 - 6, HEIGHT - gap / 2 + 6)
    labels = [
        f'<span class="label k{color}" style="top:{position:.1f}px">{escape(series.label)}<b>{format_value(final, series.unit)}</b></span>'
        for (color, series, _, final), position in zip(label_positions, positions, strict=True)
    ]
    y_ticks = [f'<span class="y" style="top:{_y(t, y_axis):.1f}px">{tick_label(t, unit)}</span>' for t in y_axis.ticks]
    kind = "plot stack" if chart.stack else "plot"
    return (
        f'<figure class="card"><figcaption><h3>{escape(chart.title)}</h3><p>{escape(chart.note)}</p></figcaption>'
        f'<div class="{kind}"><div class="area"><svg viewBox="0 0 {_WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(chart.title)}">{"".join(shapes)}</svg>{"".join(dots)}{"".join(y_ticks)}'
        f"{_x_labels(phases, x_axis)}{''.join(labels)}{_hover_strips(curves, phases, x_axis)}</div></div></figure>"
    )


def sparkline_svg(points: Points, color: int) -> str:
    """A curve without axes, for a headline."""
    if len(points) < 2:
        return ""
    pts = downsample(_smooth(points), 120)
    values = [y for _, y in pts]
    low, high = min(values), max(values)
    x_axis = Axis(pts[0][0], pts[-1][0], [])
    y_axis = Axis(low - 0.05 * ((high - low) or 1), high + 0.05 * ((high - low) or 1), [])
    return (
        f'<svg class="spark" viewBox="0 0 {_WIDTH} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true">'
        f'<path class="line k{color}" d="{_path(pts, x_axis, y_axis)}"/></svg>'
    )


def _smooth(points: Points) -> Points:
    """The moving average of a long series; a short one unchanged."""
    return moving_average(points, max(1, len(points) // 25)) if len(points) >= _MIN_SMOOTHED_POINTS else points


def moving_average(points: Points, half_width: int) -> Points:
    """The mean of each point and of up to `half_width` points on each side."""
    sums = [0.0, *accumulate(y for _, y in points)]
    spans = ((max(0, i - half_width), min(len(points), i + half_width + 1)) for i in range(len(points)))
    return [(x, (sums[b] - sums[a]) / (b - a)) for (x, _), (a, b) in zip(points, spans, strict=True)]


def downsample(points: Points, limit: int) -> Points:
    """At most `limit` points, each the mean of some neighbors, except for the last one, which is unchanged."""
    if len(points) <= limit:
        return points
    edges = [round(i * len(points) / limit) for i in range(limit)]
    bins = [points[start:end] for start, end in pairwise(edges)]
    return [*((fmean(x for x, _ in neighbors), fmean(y for _, y in neighbors)) for neighbors in bins), points[-1]]


def _split_by_phase(points: Points, phases: Sequence[Phase]) -> list[Points]:
    """The points of each phase. Neither a line nor an average crosses phases."""
    pieces = [[(x, y) for x, y in points if (x > phase.begin or i == 0) and x <= phase.end] for i, phase in enumerate(phases)]
    return [piece for piece in pieces if piece]


def _stack_layers(layers: list[Points]) -> list[Points]:
    steps = sorted({x for pts in layers for x, _ in pts})
    height = dict.fromkeys(steps, 0.0)
    result = []
    for pts in layers:
        values = dict(pts)
        for x in steps:
            height[x] += values.get(x, 0.0)
        result.append(downsample(_smooth([(x, height[x]) for x in steps]), _MAX_POINTS))
    return result


def _x(value: float, axis: Axis) -> float:
    return axis.position(value) * _WIDTH


def _y(value: float, axis: Axis) -> float:
    return (1 - axis.position(value)) * HEIGHT


def _path(points: Points, x_axis: Axis, y_axis: Axis) -> str:
    return "M" + "L".join(f"{_x(x, x_axis):.1f},{_y(y, y_axis):.1f}" for x, y in points)


def _dot(x: float, y: float, color: int, x_axis: Axis, y_axis: Axis) -> str:
    return f'<i class="dot k{color}" style="left:{100 * x_axis.position(x):.2f}%;top:{_y(y, y_axis):.1f}px"></i>'


def _bands(phases: Sequence[Phase], axis: Axis) -> str:
    """A darker background for all phases but the last."""
    return "".join(
        f'<rect class="band" x="{_x(p.begin, axis):.1f}" y="0" width="{_x(p.end, axis) - _x(p.begin, axis):.1f}" height="{HEIGHT}"/>'
        for p in phases[:-1]
    )


def _x_labels(phases: Sequence[Phase], axis: Axis) -> str:
    """Tick labels, which count within each phase, and the name of each phase at its first step."""
    parts = []
    span = axis.high - axis.low
    for phase in phases:
        begin, end = max(phase.begin, axis.low), min(phase.end, axis.high)
        share = (end - begin) / span
        steps = linear_axis(begin - phase.offset, end - phase.offset, count=max(1, round(5 * share))).ticks
        positions = [(t, axis.position(t + phase.offset)) for t in steps if begin < t + phase.offset <= end and t == round(t)]
        parts += [f'<span class="x" style="left:{100 * position:.2f}%">{tick_label(t, "number")}</span>' for t, position in positions]
        if len(phases) > 1:
            parts.append(f'<span class="phase" style="left:{100 * axis.position(begin):.2f}%">{escape(phase.name.upper())}</span>')
    name = phases[0].name.upper() if len(phases) == 1 else ""
    return "".join(parts) + f'<span class="xname">{escape(f"{name} step")}</span>'


def _hover_strips(curves: list[tuple[int, Series, Points]], phases: Sequence[Phase], axis: Axis) -> str:
    """Hover strips over the drawing, one per step but at most `_MAX_HOVER_STRIPS`, that show the values of the step."""
    steps = evenly_spaced(sorted({x for _, _, pts in curves for x, _ in pts}), _MAX_HOVER_STRIPS)
    lookup = [(color, series, dict(pts)) for color, series, pts in curves]
    parts = []
    for i, x in enumerate(steps):
        position = axis.position(x)
        left = (axis.position(steps[i - 1]) + position) / 2 if i else max(0.0, position - 0.005)
        right = (axis.position(steps[i + 1]) + position) / 2 if i + 1 < len(steps) else min(1.0, position + 0.005)
        phase = next((p for p in phases if x <= p.end), phases[-1])
        rows = "".join(
            f'<span class="k{color}">{escape(series.label)}<b>{format_value(values[x], series.unit)}</b></span>'
            for color, series, values in lookup
            if x in values
        )
        side = " flip" if position > 0.5 else ""
        inner = 100 * (position - left) / (right - left)
        parts.append(
            f'<div class="hit" style="left:{100 * left:.2f}%;width:{100 * (right - left):.2f}%"><i style="left:{inner:.0f}%"></i>'
            f'<div class="tip{side}"><em>{escape(f"{phase.name.upper()} step")} {x - phase.offset:g}</em>{rows}</div></div>'
        )
    return "".join(parts)


def page(title: str, subtitle: str, body: str, footer: str) -> str:
    """A complete document. `body` is HTML, the other arguments are text."""
    style = Path(__file__).with_name("report.css").read_text()
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)} · mtpctl</title><style>{style}</style></head><body><main>'
        f"<header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p></header>{body}"
        f"<footer>mtpctl · {escape(footer)}</footer></main></body></html>\n"
    )


def write_page(target: Path, text: str) -> None:
    """Write the page atomically. Raises UserError if `target` cannot be written or is not a file."""
    try:
        if not target.name or (target.exists() and not target.is_file()):
            raise UserError(f"--out: cannot write {target} (not a file); choose another path")
        write_atomically(target, text)
    except OSError as error:
        raise UserError(f"--out: cannot write {target} ({error.strerror}); choose another path") from error
