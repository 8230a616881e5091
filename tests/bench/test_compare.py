"""Figures of two results are matched by name, and judged if their name determines which side is better."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtpctl.bench.compare import better, changes, figures, read, table, unlike
from mtpctl.bench.logprob import Finding, Load, Report, as_json
from mtpctl.bench.sync_weights import Result
from mtpctl.bench.sync_weights import as_json as sync_json
from mtpctl.errors import UserError


def test_figures_are_named_by_their_path() -> None:
    document = {"results": [{"name": "fused", "seed": 1, "median_ms": 3.0, "ok": True, "runs": [1, 2]}], "environment": {"cards": 2}}
    assert figures(document) == {"results.fused 1.median_ms": 3.0, "results.fused 1.runs.0": 1.0, "results.fused 1.runs.1": 2.0}


def test_entries_are_matched_in_any_order() -> None:
    first = {"results": [{"name": "a", "median_ms": 1.0}, {"name": "b", "median_ms": 2.0}]}
    second = {"results": [{"name": "b", "median_ms": 2.0}, {"name": "a", "median_ms": 1.5}]}
    assert [(c.name, c.ratio) for c in changes(first, second)] == [("results.a.median_ms", 1.5), ("results.b.median_ms", 1.0)]


def test_entries_with_the_same_name_are_distinct() -> None:
    """As in the rollout benchmark, which has the same way under two loads."""
    rows = [{"what": "mtpctl", "load": f"batch {batch}", "tokens_per_s": 10.0 * batch} for batch in (8, 64)]
    slower = [rows[0] | {"tokens_per_s": 40.0}, rows[1]]
    compared = changes({"results": rows}, {"results": slower})
    assert [(c.name, c.worse_by) for c in compared] == [
        ("results.mtpctl batch 8.tokens_per_s", 0.5),
        ("results.mtpctl batch 64.tokens_per_s", 0.0),
    ]
    twins = figures([{"name": "a", "x": 1}, {"name": "a", "x": 2}])
    assert sorted(twins.values()) == [1, 2]


def test_finding_of_the_logprob_benchmark_is_judged_by_its_unit() -> None:
    findings = [
        Finding("through the server", 1000.0, "tokens/s"),
        Finding("share of the bare pass", 0.9, "", 0.85, at_least=True),
        Finding("added by the server", 1.0, "ms", 5.0),
        Finding("update", 2.0, "s"),
        Finding("memory for logits", 0.5, "GiB", 1.0),
        Finding("difference", 1e-7, "nats", 1e-6),
    ]
    worse = [replace(each, value=(each.value or 0) * (0.5 if each.at_least or each.unit == "tokens/s" else 1.5)) for each in findings]
    first, second = (as_json(Report(each), {}, Load((2, 3))) for each in (findings, worse))
    judged = [change for change in changes(first, second) if change.worse_by > 0.4]
    assert [change.name.split(".")[1] for change in judged] == [each.what for each in findings]


def test_results_with_different_options_are_reported() -> None:
    first = {"options": {"tokens": 8192, "samples": 8, "folder": "/a"}, "median_ms": 1.0}
    other = {"options": {"tokens": 4096, "samples": 8, "folder": "/b", "lora": 16}, "median_ms": 1.0}
    assert unlike(first, other) == ["tokens: 8192 and 4096"] and unlike(first, first) == []
    assert unlike(first, {"median_ms": 1.0}) == [] and unlike([1.0], [2.0]) == []
    assert [change.name for change in changes(first, other)] == ["median_ms"]


def test_slower_sync_is_worse() -> None:
    def document(seconds: float) -> Any:
        result = Result("nccl", 10**9, 1, link_gb_per_s=100.0, verified=3)
        for name in ("seconds", "export_seconds", "wire_seconds", "stall_seconds", "back_seconds", "tokens_per_s"):
            setattr(result, name, [1.0])
        result.seconds = result.stall_seconds = [seconds] * 3
        return sync_json([result], {}, {})

    worse = [change.name for change in changes(document(0.2), document(2.0)) if change.worse_by > 0.05]
    assert worse == ["results.nccl.median.seconds", "results.nccl.median.stall_seconds"]


@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("results.fused.median_ms", "lower"),
        ("peak_gib", "lower"),
        ("results.forward ours.ms", "lower"),
        ("sync.stall_seconds", "lower"),
        ("results.k1.tokens_per_s", "higher"),
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
    assert better(name) == side


def test_lower_throughput_and_higher_latency_are_worse() -> None:
    slower, fewer = changes({"median_ms": 10.0, "tokens_per_s": 100.0}, {"median_ms": 12.0, "tokens_per_s": 80.0})
    assert slower.worse_by == pytest.approx(0.2) and fewer.worse_by == pytest.approx(0.2)
    assert table([slower, fewer], 0.05).count("worse") == 2 and "worse" not in table([slower, fewer], 0.25)


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
    (change,) = changes({name: before}, {name: after})
    assert change.worse_by == worse_by


def test_unreadable_files_and_files_without_shared_figures_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        read(tmp_path / "broken.json")
    (tmp_path / "good.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(UserError, match="share no figure"):
        changes(read(tmp_path / "good.json"), {"b": 2})
