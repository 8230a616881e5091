"""Environment and JSON of every benchmark."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from mtpctl.bench import compare, mtp
from mtpctl.bench.report import cuda_visible_devices, describe, machine, machines, markdown, to_json
from mtpctl.bench.sync_weights import as_json
from tests.fakes.bench_results import drafting_run, mtp_outcome, sync_result


def versions(*cards: str, torch: str = "2.13.0") -> dict[str, Any]:
    return {"python": "3.12.1", "packages": {"torch": torch}, "machine": {"cores": 64, "cards": list(cards)}}


def test_device_is_the_gpus_or_the_cpu() -> None:
    assert describe(machine(versions("H200", "H200"))) == "H200 x 2 · python 3.12.1 · torch 2.13.0"
    assert machine(versions())["device"] == "CPU, 64 cores"


def test_environment_of_several_machines_lists_different_values() -> None:
    environment = machines([versions("H200"), versions("H200"), versions("H100", torch="2.14.0")])
    assert environment == {"device": "H200 x 1 / H100 x 1", "python": "3.12.1", "torch": "2.13.0 / 2.14.0"}


def test_cards_are_counted_among_those_visible_to_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cuda_visible_devices([0, 2]) == "0,2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert cuda_visible_devices([0, 2]) == "4,7"


def test_table_is_markdown() -> None:
    assert markdown(("a", "b"), [(1, "x"), (2, "y")]) == "| a | b |\n|---|---|\n| 1 | x |\n| 2 | y |"


def strict(text: str) -> Any:
    """Parse JSON that must have no NaN and no infinity."""

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_are_not_finite_become_null() -> None:
    document = {"a": [1.5, math.inf, (math.nan, -math.inf)], "b": {"c": 2, "d": None}}
    assert strict(to_json(document)) == {"a": [1.5, None, [None, None]], "b": {"c": 2, "d": None}}


def test_throughput_that_did_not_recover_is_null() -> None:
    text = to_json(as_json([sync_result(back_seconds=[0.5, math.inf, math.inf], export_seconds=[0.1])], {"device": "H200 x 2"}, {}))
    (result,) = strict(text)["results"]
    assert result["back_seconds"] == [0.5, None, None] and result["median"]["back_seconds"] is None


def test_gain_over_a_frozen_drafter_that_accepted_nothing_is_null() -> None:
    results = mtp.summarise([mtp_outcome("frozen", drafting_run([0.0] * 3)), mtp_outcome("trained", drafting_run([1.0] * 3))], last=3)
    document = strict(to_json(mtp.as_json(results, {}, 3)))
    assert document["trained_against_frozen"] == {"points": 100.0, "relative": None, "standard_errors": None}


def test_ratio_to_a_figure_that_was_zero_is_null() -> None:
    assert strict(to_json(compare.as_json(compare.changes({"a": 0}, {"a": 1}))))[0]["ratio"] is None
