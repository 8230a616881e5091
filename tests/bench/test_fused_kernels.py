"""`mtpctl bench fused-kernels` on a CPU: the table, the bounds, and the exit codes."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from mtpctl.bench import fused_kernels as bench
from mtpctl.cli.bench import app
from mtpctl.errors import ThresholdMissed, UserError


@pytest.fixture(scope="module")
def results() -> list[bench.Result]:
    return bench.measure(bench.Shape(24, 16, 300), with_peers=True, device="cpu")


def test_each_kind_of_work_has_a_floor_own_cases_and_a_peer(results: list[bench.Result]) -> None:
    for work in ("forward", "forward+backward"):
        names = {r.name for r in results if r.what == work}
        assert {"floor", "chunked, 1 GiB", "torch eager"} <= names
        floor = next(r for r in results if r.what == work and r.name == "floor")
        for r in results:
            if r.what == work:
                assert r.ratio == pytest.approx(r.ms / floor.ms)
                assert r.fastest_ms <= r.ms <= r.slowest_ms


def test_missed_bounds_are_reported() -> None:
    case = bench.Case("forward", "own", lambda x: bench.Output(), 1.12, 0.5)
    reference, larger = bench.Shape(8192, 4096, 151680), bench.Shape(32768, 4096, 151680)
    assert bench.find_misses(case, reference, 1.10, 0.4) == ()
    assert bench.find_misses(case, reference, 1.20, 0.6) == ("1.20x, bound 1.12x", "0.60 GiB, bound 0.50")
    assert bench.find_misses(case, larger, 1.20, 1.9) == ()
    assert bench.find_misses(case, larger, 1.24, 2.1) == ("1.24x, bound 1.23x", "2.10 GiB, bound 2.00")


def test_json_has_the_environment_and_every_result() -> None:
    done = CliRunner().invoke(app, ["fused-kernels", "--shape", "16x8x100", "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.output)
    assert document["environment"]["device"].startswith("CPU") and document["environment"]["torch"]
    assert {r["name"] for r in document["results"]} == {"floor", "chunked, 1 GiB"}


def test_table_describes_the_timed_region() -> None:
    done = CliRunner().invoke(app, ["fused-kernels", "--shape", "16x8x100"])
    assert "The timer covers: one whole call" in done.output
    assert "| 16x8x100 | forward | floor |" in done.output


def test_invalid_shape_is_a_user_error() -> None:
    done = CliRunner().invoke(app, ["fused-kernels", "--shape", "16x8"])
    assert isinstance(done.exception, UserError)
    assert "--shape: '16x8', expected ROWSxHIDDENxVOCAB" in str(done.exception)


def test_missed_bound_gives_exit_code_6(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = bench.Result("s", "forward", "own", 2.0, 2.0, 2.0, 2.0, None, False, ("2.00x, bound 1.12x",))
    monkeypatch.setattr(bench, "measure", lambda *a, **k: [slow])
    done = CliRunner().invoke(app, ["fused-kernels", "--shape", "16x8x100"])
    assert isinstance(done.exception, ThresholdMissed) and done.exception.exit_code == 6
    assert "MISSED s forward own: 2.00x, bound 1.12x" in done.output
