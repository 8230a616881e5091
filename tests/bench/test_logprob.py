"""`bench logprob`: bounds, workload and options. Figures are measured by the command itself."""

from __future__ import annotations

import math

import pytest
from typer.testing import CliRunner

from mtpctl.bench.logprob import MIN_RELATIVE_THROUGHPUT, Measurement, Report, Workload, format_table, to_document
from mtpctl.cli.app import app


def test_bound_is_missed_only_on_its_side() -> None:
    assert Measurement("share", MIN_RELATIVE_THROUGHPUT - 0.01, "", MIN_RELATIVE_THROUGHPUT, at_least=True).missed
    assert not Measurement("share", MIN_RELATIVE_THROUGHPUT, "", MIN_RELATIVE_THROUGHPUT, at_least=True).missed
    assert Measurement("added", 5.01, "ms", 5.0).missed and not Measurement("added", -1.0, "ms", 5.0).missed
    assert not Measurement("memory", None, "GiB", 1.0).missed and not Measurement("bare", 9e9, "tokens/s").missed


def test_nan_misses_every_bound() -> None:
    assert Measurement("difference", math.nan, "nats", 0.1).missed and Measurement("share", math.nan, "", 0.8, at_least=True).missed


def test_table_has_bounds_ratios_and_figures_not_measured() -> None:
    report = Report([Measurement("added", 10.0, "ms", 5.0, detail="12 in all"), Measurement("memory", None, "GiB", 1.0)])
    lines = format_table(report).splitlines()
    assert lines[2] == "| added | 10 ms | ≤ 5 ms | 2.00 | **missed** · 12 in all |"
    assert lines[3].startswith("| memory | not measured on a CPU | ≤ 1 GiB |")
    document = to_document(report, {"device": "CPU"}, Workload((2, 3)))
    assert [finding["missed"] for finding in document["findings"]] == [True, False] and document["timer"]


def test_requests_have_the_configured_lengths_and_depend_only_on_the_seed() -> None:
    workload = Workload((5, 40))
    requests = workload.draw(100, 64, seed=1)
    assert {r.tokens for r in requests} <= set(range(5, 41)) and requests == workload.draw(100, 64, seed=1)
    assert all(1 <= r.prompt_length < r.tokens and max(r.token_ids) < 100 for r in requests)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--lengths", "many"], "--lengths: many is not MIN:MAX"),
        (["--lengths", "40:20"], "--lengths: 40:20 must be MIN:MAX between 2 and"),
        (["--lengths", "2:99999999"], "positions"),
        (["--precision", "fp8"], "--precision: fp8 is neither fp32 nor bf16"),
        (["--model", "missing/nothing"], "--model: missing/nothing is neither a folder"),
    ],
)
def test_invalid_options_are_rejected_before_anything_starts(arguments: list[str], reason: str) -> None:
    result = CliRunner().invoke(app, ["bench", "logprob", *arguments])
    assert result.exit_code == 2 and reason in result.output and "Traceback" not in result.output
