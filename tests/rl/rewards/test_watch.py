"""When a call takes far longer than others did."""

from __future__ import annotations

import pytest

from mtpctl.rl.rewards.watch import Usual


def usual(*burnt: float, answered: int = 50) -> Usual:
    made = Usual()
    for seconds in burnt:
        made.add(seconds, seconds, answered)
    return made


def test_a_call_computes_for_long_beyond_three_times_what_nearly_all_others_took() -> None:
    assert usual(*[0.01] * 60).burnt_s(50) == pytest.approx(0.03)
    assert usual(*[0.01] * 40, *[0.02] * 24).burnt_s(50) == pytest.approx(0.06)
    assert usual(*[0.0001] * 60).burnt_s(50) == pytest.approx(0.01), "a CPU's clock tells no less than a few milliseconds"


def test_calls_that_hung_before_make_no_other_one_short() -> None:
    assert usual(*[0.01] * 50, *[30.0] * 14).burnt_s(50) == pytest.approx(0.1), "ten times the median"


def test_the_first_calls_of_a_process_are_compared_with_those_of_others() -> None:
    assert Usual().burnt_s(0) == usual(*[0.01] * 60).burnt_s(0) == pytest.approx(0.25), "nothing is known of them"
    assert usual(*[0.02] * 8, answered=0).burnt_s(0) == pytest.approx(0.06)
    assert usual(*[0.2] * 8, answered=0).burnt_s(0) == pytest.approx(0.25)


def test_on_the_clock_a_call_is_long_beyond_ten_times_the_median_and_a_first_one_later() -> None:
    assert usual(*[0.02] * 9).long_s(1) == pytest.approx(0.2)
    assert Usual().long_s(0) > usual(0.001).long_s(0) > usual(0.001).long_s(1)
