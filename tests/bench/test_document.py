"""A bench's JSON is one that every reader takes."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from mtpctl.bench import document
from mtpctl.bench.sync_results import as_json
from tests.bench.test_sync_results import result


def refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is no JSON")


def test_numbers_that_are_none_become_null() -> None:
    found = document.text({"a": [1.5, math.inf, (math.nan, -math.inf)], "b": {"c": 2, "d": None}})
    assert json.loads(found, parse_constant=refuse) == {"a": [1.5, None, [None, None]], "b": {"c": 2, "d": None}}


def test_throughput_that_was_not_back_in_time() -> None:
    told = document.text(as_json([result(back_seconds=[0.5, math.inf, math.inf], export_seconds=[0.1])], {"device": "H200 x 2"}, {}))
    (found,) = json.loads(told, parse_constant=refuse)["results"]
    assert found["back_seconds"] == [0.5, None, None] and found["median"]["back_seconds"] is None


@pytest.mark.parametrize("name", ["mtp", "compare"])
def test_gains_over_nothing(name: str) -> None:
    """A frozen drafter of which nothing was accepted; a figure that was 0."""
    from mtpctl.bench import compare, mtp
    from tests.bench.test_mtp import outcome, run

    if name == "mtp":
        results = mtp.summarise([outcome("frozen", run([0.0] * 3)), outcome("trained", run([1.0] * 3))], last=3)
        found = json.loads(document.text(mtp.as_json(results, {}, 3)), parse_constant=refuse)
        assert found["trained_against_frozen"] == {"points": 100.0, "relative": None, "standard_errors": None}
    else:
        found = json.loads(document.text(compare.as_json(compare.changes({"a": 0}, {"a": 1}))), parse_constant=refuse)
        assert found[0]["ratio"] is None
