"""What a measurement says that it ran on."""

from __future__ import annotations

from typing import Any

import pytest

from mtpctl.bench.machine import machine, machines, told, visible_cards


def versions(*cards: str, torch: str = "2.13.0") -> dict[str, Any]:
    return {"python": "3.12.1", "packages": {"torch": torch}, "machine": {"cores": 64, "cards": list(cards)}}


def test_cards_by_kind_else_the_processor() -> None:
    assert told(machine(versions("H200", "H200"))) == "H200 x 2 · python 3.12.1 · torch 2.13.0"
    assert machine(versions())["device"] == "CPU, 64 cores"
    unknown = versions()
    del unknown["machine"]["cards"]
    assert machine(unknown)["device"] == "cards not recorded, 64 cores"


def test_runs_of_several_machines_are_told_of_as_such() -> None:
    found = machines([versions("H200"), versions("H200"), versions("H100", torch="2.14.0")])
    assert found == {"device": "H200 x 1 / H100 x 1", "python": "3.12.1", "torch": "2.13.0 / 2.14.0"}


def test_cards_are_counted_among_those_that_this_process_may_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_cards([0, 2]) == "0,2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert visible_cards([0, 2]) == "4,7"
