"""Ticks are round and enclose the data; labels keep apart."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpctl.telemetry.charts import linear_axis, log_axis, space_apart, tick_label


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
def test_linear_ticks(low: float, high: float, zero: bool, ticks: list[float]) -> None:
    assert linear_axis(low, high, zero=zero).ticks == ticks


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.booleans())
def test_linear_axes_enclose_their_data(a: float, b: float, zero: bool) -> None:
    low, high = min(a, b), max(a, b)
    axis = linear_axis(low, high, zero=zero)
    slack = 1e-6 * (axis.high - axis.low)
    assert axis.low <= low + slack and axis.high >= high - slack
    assert 2 <= len(axis.ticks) <= 8
    assert axis.position(axis.low) == 0 and axis.position(axis.high) == 1


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0.1, 6.0, [0.1, 0.2, 0.5, 1, 2, 5, 10]), (3e-5, 0.02, [1e-5, 1e-4, 1e-3, 1e-2, 1e-1]), (0.3, 0.3, [0.2, 0.5])],
)
def test_log_ticks(low: float, high: float, ticks: list[float]) -> None:
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


def test_labels_that_have_room_stay_where_they_want_to_be() -> None:
    assert space_apart([100.0, 20.0, 150.0], 17.0, 0.0, 190.0) == [100.0, 20.0, 150.0]


def test_tick_labels() -> None:
    assert tick_label(0.25, "share") == "25%"
    assert tick_label(2000, "tokens/s") == "2k"
