"""Environment and JSON of every benchmark."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtpctl.bench import logprob, mtp, sync_weights
from mtpctl.bench.logprob import Measurement, Report, Workload
from mtpctl.bench.report import (
    better_direction,
    changes_to_json,
    compare_results,
    cuda_visible_devices,
    describe_machine,
    differing_options,
    extract_figures,
    format_changes,
    format_environment,
    markdown_table,
    merge_machines,
    read_result,
    to_json,
)
from mtpctl.bench.sync_weights import Result
from mtpctl.errors import UserError
from tests.fakes.bench_results import drafting_run, mtp_outcome, sync_result


def versions(*gpus: str, torch: str = "2.13.0") -> dict[str, Any]:
    return {"python": "3.12.1", "packages": {"torch": torch}, "machine": {"cores": 64, "cards": list(gpus)}}


def test_device_is_the_gpus_or_the_cpu() -> None:
    assert format_environment(describe_machine(versions("H200", "H200"))) == "H200 x 2 · python 3.12.1 · torch 2.13.0"
    assert describe_machine(versions())["device"] == "CPU, 64 cores"


def test_environment_of_several_machines_lists_different_values() -> None:
    environment = merge_machines([versions("H200"), versions("H200"), versions("H100", torch="2.14.0")])
    assert environment == {"device": "H200 x 1 / H100 x 1", "python": "3.12.1", "torch": "2.13.0 / 2.14.0"}


def test_gpus_are_counted_among_those_visible_to_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cuda_visible_devices([0, 2]) == "0,2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert cuda_visible_devices([0, 2]) == "4,7"


def test_results_are_printed_as_a_markdown_table() -> None:
    assert markdown_table(("a", "b"), [(1, "x"), (2, "y")]) == "| a | b |\n|---|---|\n| 1 | x |\n| 2 | y |"


def strict(text: str) -> Any:
    """Parse JSON that must have no NaN and no infinity."""

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_are_not_finite_become_null() -> None:
    document = {"a": [1.5, math.inf, (math.nan, -math.inf)], "b": {"c": 2, "d": None}}
    assert strict(to_json(document)) == {"a": [1.5, None, [None, None]], "b": {"c": 2, "d": None}}


def test_throughput_that_did_not_recover_is_null() -> None:
    text = to_json(
        sync_weights.to_document([sync_result(back_seconds=[0.5, math.inf, math.inf], export_seconds=[0.1])], {"device": "H200 x 2"}, {})
    )
    (result,) = strict(text)["results"]
    assert result["back_seconds"] == [0.5, None, None] and result["median"]["back_seconds"] is None


def test_gain_over_a_frozen_drafter_that_accepted_nothing_is_null() -> None:
    results = mtp.summarize(
        [mtp_outcome("frozen", drafting_run([0.0] * 3)), mtp_outcome("trained", drafting_run([1.0] * 3))], last_updates=3
    )
    document = strict(to_json(mtp.to_document(results, {}, 3)))
    assert document["trained_against_frozen"] == {"points": 100.0, "relative": None, "standard_errors": None}


def test_ratio_to_a_figure_that_was_zero_is_null() -> None:
    assert strict(to_json(changes_to_json(compare_results({"a": 0}, {"a": 1}))))[0]["ratio"] is None


def test_figures_are_named_by_their_path() -> None:
    document = {"results": [{"name": "fused", "seed": 1, "median_ms": 3.0, "ok": True, "runs": [1, 2]}], "environment": {"cards": 2}}
    assert extract_figures(document) == {"results.fused 1.median_ms": 3.0, "results.fused 1.runs.0": 1.0, "results.fused 1.runs.1": 2.0}


def test_entries_are_matched_in_any_order() -> None:
    first = {"results": [{"name": "a", "median_ms": 1.0}, {"name": "b", "median_ms": 2.0}]}
    second = {"results": [{"name": "b", "median_ms": 2.0}, {"name": "a", "median_ms": 1.5}]}
    assert [(c.name, c.ratio) for c in compare_results(first, second)] == [("results.a.median_ms", 1.5), ("results.b.median_ms", 1.0)]


def test_entries_with_the_same_name_are_distinct() -> None:
    """As in the rollout benchmark, which has the same way under two loads."""
    rows = [{"what": "mtpctl", "load": f"batch {batch}", "tokens_per_s": 10.0 * batch} for batch in (8, 64)]
    slower = [rows[0] | {"tokens_per_s": 40.0}, rows[1]]
    compared = compare_results({"results": rows}, {"results": slower})
    assert [(c.name, c.worse_by) for c in compared] == [
        ("results.mtpctl batch 8.tokens_per_s", 0.5),
        ("results.mtpctl batch 64.tokens_per_s", 0.0),
    ]
    twins = extract_figures([{"name": "a", "x": 1}, {"name": "a", "x": 2}])
    assert sorted(twins.values()) == [1, 2]


def test_finding_of_the_logprob_benchmark_is_judged_by_its_unit() -> None:
    findings = [
        Measurement("through the server", 1000.0, "tokens/s"),
        Measurement("share of the bare pass", 0.9, "", 0.85, at_least=True),
        Measurement("added by the server", 1.0, "ms", 5.0),
        Measurement("update", 2.0, "s"),
        Measurement("memory for logits", 0.5, "GiB", 1.0),
        Measurement("difference", 1e-7, "nats", 1e-6),
    ]
    worse = [replace(each, value=(each.value or 0) * (0.5 if each.at_least or each.unit == "tokens/s" else 1.5)) for each in findings]
    first, second = (logprob.to_document(Report(each), {}, Workload((2, 3))) for each in (findings, worse))
    judged = [change for change in compare_results(first, second) if change.worse_by > 0.4]
    assert [change.name.split(".")[1] for change in judged] == [each.what for each in findings]


def test_results_with_different_options_are_reported() -> None:
    first = {"options": {"tokens": 8192, "samples": 8, "folder": "/a"}, "median_ms": 1.0}
    other = {"options": {"tokens": 4096, "samples": 8, "folder": "/b", "lora": 16}, "median_ms": 1.0}
    assert differing_options(first, other) == ["tokens: 8192 and 4096"] and differing_options(first, first) == []
    assert differing_options(first, {"median_ms": 1.0}) == [] and differing_options([1.0], [2.0]) == []
    assert [change.name for change in compare_results(first, other)] == ["median_ms"]


def test_slower_sync_is_worse() -> None:
    def document(seconds: float) -> Any:
        result = Result("nccl", 10**9, 1, link_gb_per_s=100.0, verified=3)
        for name in ("seconds", "export_seconds", "wire_seconds", "stall_seconds", "back_seconds", "tokens_per_s"):
            setattr(result, name, [1.0])
        result.seconds = result.stall_seconds = [seconds] * 3
        return sync_weights.to_document([result], {}, {})

    worse = [change.name for change in compare_results(document(0.2), document(2.0)) if change.worse_by > 0.05]
    assert worse == ["results.nccl.median.seconds", "results.nccl.median.stall_seconds"]


@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("results.fused.median_ms", "lower"),
        ("peak_gib", "lower"),
        ("results.forward ours.ms", "lower"),
        ("sync.stall_seconds", "lower"),
        ("results.k1.tokens_per_s", "higher"),
        ("answers_per_s", "higher"),
        ("gb_per_s", "higher"),
        ("acceptance", "higher"),
        ("best_speedup", "higher"),
        ("results.partial 0.late_mean", "higher"),
        ("results.partial 0.worst_fall", "lower"),
        ("results.partial 0.held_updates", "lower"),
        ("results.partial 0.held_s", "lower"),
        ("results.partial 0.updates", None),
        ("results.fused.runs.0", None),
        ("version", None),
    ],
)
def test_name_determines_the_better_side(name: str, side: str | None) -> None:
    assert better_direction(name) == side


def test_lower_throughput_and_higher_latency_are_worse() -> None:
    slower, fewer = compare_results({"median_ms": 10.0, "tokens_per_s": 100.0}, {"median_ms": 12.0, "tokens_per_s": 80.0})
    assert slower.worse_by == pytest.approx(0.2) and fewer.worse_by == pytest.approx(0.2)
    assert format_changes([slower, fewer], 0.05).count("worse") == 2 and "worse" not in format_changes([slower, fewer], 0.25)


@pytest.mark.parametrize(
    ("name", "before", "after", "worse_by"),
    [
        ("stall_seconds", 0.0, 0.5, math.inf),
        ("trained_against_frozen.points", -2.0, -5.0, 1.5),
        ("trained_against_frozen.points", 2.0, -1.0, 1.5),
        ("trained_against_frozen.points", -2.0, 1.0, -1.5),
        ("acceptance", 0.0, 0.4, -math.inf),
        ("stall_seconds", 0.0, 0.0, 0.0),
    ],
)
def test_zero_and_negative_figures_can_get_worse(name: str, before: float, after: float, worse_by: float) -> None:
    (change,) = compare_results({name: before}, {name: after})
    assert change.worse_by == worse_by


def test_unreadable_files_and_files_without_shared_figures_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_result(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        read_result(tmp_path / "broken.json")
    (tmp_path / "good.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(UserError, match="share no figure"):
        compare_results(read_result(tmp_path / "good.json"), {"b": 2})
