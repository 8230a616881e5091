"""Charts: ticks enclose the data, labels do not overlap, nothing is drawn outside, and nothing at all without data."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpctl.telemetry.charts import (
    HEIGHT,
    Chart,
    Phase,
    Series,
    downsample,
    linear_axis,
    log_axis,
    moving_average,
    render_chart,
    space_apart,
    sparkline_svg,
    tick_label,
)


@pytest.mark.parametrize(
    ("low", "high", "zero", "ticks"),
    [
        (0.31, 0.88, False, [0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.31, 0.88, True, [0, 0.25, 0.5, 0.75, 1.0]),
        (-0.4, 0.9, False, [-0.5, 0, 0.5, 1.0]),
        (2100, 5600, True, [0, 2000, 4000, 6000]),
        (0, 0, True, [0, 0.25, 0.5, 0.75, 1.0]),
    ],
)
def test_linear_axis_has_round_ticks(low: float, high: float, zero: bool, ticks: list[float]) -> None:
    assert linear_axis(low, high, include_zero=zero).ticks == ticks


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.booleans())
def test_linear_axes_enclose_their_data(a: float, b: float, zero: bool) -> None:
    low, high = min(a, b), max(a, b)
    axis = linear_axis(low, high, include_zero=zero)
    slack = 1e-6 * (axis.high - axis.low)
    assert axis.low <= low + slack and axis.high >= high - slack
    assert 2 <= len(axis.ticks) <= 8
    assert axis.position(axis.low) == 0 and axis.position(axis.high) == 1


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0.1, 6.0, [0.1, 0.2, 0.5, 1, 2, 5, 10]), (3e-5, 0.02, [1e-5, 1e-4, 1e-3, 1e-2, 1e-1]), (0.3, 0.3, [0.2, 0.5])],
)
def test_log_axis_has_round_ticks(low: float, high: float, ticks: list[float]) -> None:
    assert log_axis(low, high).ticks == pytest.approx(ticks)


@given(st.floats(-12, 9), st.floats(0, 10))
def test_log_axes_enclose_their_data(exponent: float, decades: float) -> None:
    low, high = 10.0**exponent, 10.0 ** (exponent + decades)
    axis = log_axis(low, high)
    assert axis.low <= low * 1.001 and axis.high >= high * 0.999 and axis.low < axis.high
    assert len(axis.ticks) == len(set(axis.ticks)) <= 12
    assert 0 <= axis.position(low) <= axis.position(high) <= 1


@given(st.lists(st.floats(0, 190), min_size=1, max_size=6))
def test_labels_keep_their_distance_and_order(wanted: list[float]) -> None:
    places = space_apart(wanted, 17.0, 8.0, 182.0)
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    assert all(places[b] - places[a] >= 17.0 - 1e-9 for a, b in pairwise(order))
    assert min(places) >= 8.0 - 1e-9 and max(places) <= 182.0 + 1e-9


def test_labels_with_enough_space_keep_their_positions() -> None:
    assert space_apart([100.0, 20.0, 150.0], 17.0, 0.0, 190.0) == [100.0, 20.0, 150.0]


def test_tick_labels_include_the_unit() -> None:
    assert tick_label(0.25, "share") == "25%"
    assert tick_label(2000, "tokens/s") == "2k"


RL = [Phase("rl", 0, 100, 0)]
BOTH = [Phase("sft", 0, 300, 0), Phase("rl", 300, 400, 300)]


def curve(label: str, n: int = 100, offset: int = 0, scale: float = 1.0) -> Series:
    return Series(label, [(offset + i, scale * (1 + math.sin(i / 7))) for i in range(1, n + 1)])


def parse(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(html)


def coordinates(figure: ElementTree.Element) -> list[tuple[float, float]]:
    paths = " ".join(p.get("d", "") for p in figure.iter("path"))
    return [(float(x), float(y)) for x, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)", paths)]


@pytest.mark.parametrize("scale", ["linear", "log"])
@pytest.mark.parametrize("stack", [False, True])
def test_points_are_drawn_inside_the_chart(scale: str, stack: bool) -> None:
    series = [curve("one"), curve("two", scale=30.0)]
    figure = parse(render_chart(Chart("T", "n", series, RL, scale=scale, stack=stack)))  # type: ignore[arg-type]
    points = coordinates(figure)
    assert len(points) > 200
    assert all(0 <= x <= 1000 and 0 <= y <= HEIGHT for x, y in points)


def test_series_labels_show_last_values() -> None:
    figure = parse(render_chart(Chart("Reward", "n", [Series("batch", [(1, 0.25), (2, 0.5)], "share")], RL)))
    (label,) = [e for e in figure.iter("span") if e.get("class") == "label k0"]
    assert "".join(label.itertext()) == "batch50.0%"
    ticks = [e.text for e in figure.iter("span") if e.get("class") == "y"]
    assert ticks and all(tick and tick.endswith("%") for tick in ticks)


def test_series_may_share_a_colour() -> None:
    series = [Series(f"{arm} {seed}", [(0, 0.1), (1, 0.2)], color=arm) for arm in range(2) for seed in range(2)]
    figure = parse(render_chart(Chart("A", "n", series, RL)))
    labels = [e.get("class") for e in figure.iter("span") if (e.get("class") or "").startswith("label")]
    assert labels == ["label k0", "label k0", "label k1", "label k1"]


def test_guide_is_labelled_and_not_averaged() -> None:
    """A curve with as many points is averaged and ends in a dot."""
    noisy = [(float(i), float(i % 2)) for i in range(80)]
    figure = parse(render_chart(Chart("A", "n", [curve("mean", 80), Series("level", noisy, style="guide")], RL)))
    drawn = {p.get("class"): p.get("d", "").count("L") for p in figure.iter("path")}
    assert drawn["guide k1"] == 79
    labels = ["".join(e.itertext()) for e in figure.iter("span") if (e.get("class") or "").startswith("label")]
    assert [label[:4] for label in labels] == ["mean", "leve"]
    assert [e.get("class") for e in figure.iter("i") if (e.get("class") or "").startswith("dot")] == ["dot k0"]


def test_names_and_notes_are_escaped() -> None:
    html = render_chart(Chart("a <b>", "x & y", [Series("<script>", [(1, 1.0), (2, 2.0)])], RL))
    assert "<script>" not in html
    parse(html)


def test_phases_are_marked_and_count_their_own_steps() -> None:
    series = Series("loss", [*((i, 2.0) for i in range(1, 301)), *((300 + i, 1.0) for i in range(1, 101))])
    figure = parse(render_chart(Chart("L", "n", [series], BOTH)))
    assert [e.text for e in figure.iter("span") if e.get("class") == "phase"] == ["SFT", "RL"]
    assert [e.text for e in figure.iter("span") if e.get("class") == "x"][-1] == "100"
    assert "SFT step 300" in "".join(figure.itertext()) or "SFT step 299" in "".join(figure.itertext())
    lines = [p.get("d", "") for p in figure.iter("path") if (p.get("class") or "").startswith("line")]
    heights = [{y for _, y in re.findall(r"([\d.]+),([\d.]+)", line)} for line in lines]
    assert len(lines) == 2 and all(len(h) == 1 for h in heights), "an average across the border would bend the lines"


def test_tiny_outlier_does_not_extend_log_axis() -> None:
    points = [(0.0, 1e-13), *((float(i), 2e-3 + 1e-4 * (i % 7)) for i in range(1, 81))]
    figure = parse(render_chart(Chart("Mismatch", "n", [Series("KL", points)], RL, scale="log")))
    assert [e.text for e in figure.iter("span") if e.get("class") == "y"] == ["0.001", "0.002", "0.005"]
    assert all(0 <= y <= HEIGHT for _, y in coordinates(figure)), "it is drawn at the lower edge"


def test_values_that_cannot_be_drawn_are_skipped() -> None:
    assert render_chart(Chart("T", "n", [], RL)) == ""
    assert render_chart(Chart("T", "n", [Series("a", [(1, math.nan)])], RL)) == ""
    assert render_chart(Chart("T", "n", [Series("a", [(1, 0.0), (2, -1.0)])], RL, scale="log")) == ""
    figure = parse(render_chart(Chart("T", "n", [Series("a", [(1, 1.0), (2, math.inf), (3, 2.0)])], RL)))
    assert "inf" not in ElementTree.tostring(figure, encoding="unicode")


def test_charts_and_sparklines_of_one_or_two_points_are_valid() -> None:
    parse(render_chart(Chart("T", "n", [Series("a", [(5, 0.3)], dots=True)], RL)))
    parse(render_chart(Chart("T", "n", [Series("a", [(1, 0.3), (2, 0.3)])], RL)))
    assert sparkline_svg([(1, 1.0)], 0) == ""
    parse(sparkline_svg([(1, 1.0), (2, 1.0)], 0))
    rising = parse(sparkline_svg([(0, 0.2), (100, 0.6)], 0)).find("{*}path")
    assert rising is not None
    left, right = (float(y) for y in re.findall(r",([\d.]+)", rising.attrib["d"]))
    assert left > right, "two points are no noise to average out; the page's y grows downwards"


def test_a_long_run_stays_a_small_page() -> None:
    html = render_chart(Chart("T", "n", [curve("a", 20000)], [Phase("rl", 0, 20000, 0)]))
    assert len(html) < 60_000
    assert html.count('class="hit"') == 100


def test_thinning_keeps_the_mean_and_the_end() -> None:
    points = [(float(i), float(i % 10)) for i in range(1000)]
    thinned = downsample(points, 100)
    assert len(thinned) == 100 and thinned[-1] == points[-1]
    assert sum(y for _, y in thinned[:-1]) / 99 == pytest.approx(4.5)
    assert downsample(points, 1000) is points


def test_moving_average_is_centered_and_shorter_at_the_ends() -> None:
    assert moving_average([(0, 0.0), (1, 3.0), (2, 6.0), (3, 0.0)], 1) == [(0, 1.5), (1, 3.0), (2, 3.0), (3, 3.0)]
    assert moving_average([(0, 1.0), (1, 2.0)], 0) == [(0, 1.0), (1, 2.0)]
