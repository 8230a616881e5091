"""Two results of one bench, figure by figure: entries found by what names them, judged where a name tells the better side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtpctl.bench.compare import better, changes, figures, read, table
from mtpctl.recipe import UserError


def test_figures_are_named_by_the_way_to_them() -> None:
    document = {"results": [{"name": "fused", "seed": 1, "median_ms": 3.0, "ok": True, "runs": [1, 2]}], "environment": {"cards": 2}}
    assert figures(document) == {"results.fused 1.median_ms": 3.0, "results.fused 1.runs.0": 1.0, "results.fused 1.runs.1": 2.0}


def test_entries_are_found_whatever_their_order() -> None:
    first = {"results": [{"name": "a", "median_ms": 1.0}, {"name": "b", "median_ms": 2.0}]}
    second = {"results": [{"name": "b", "median_ms": 2.0}, {"name": "a", "median_ms": 1.5}]}
    assert [(c.name, c.ratio) for c in changes(first, second)] == [("results.a.median_ms", 1.5), ("results.b.median_ms", 1.0)]


@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("results.fused.median_ms", "lower"),
        ("peak_gib", "lower"),
        ("sync.stall_seconds", "lower"),
        ("results.k1.tokens_per_s", "higher"),
        ("acceptance", "higher"),
        ("best_speedup", "higher"),
        ("results.fused.runs.0", None),
        ("version", None),
    ],
)
def test_the_better_side_follows_from_the_name(name: str, side: str | None) -> None:
    assert better(name) == side


def test_worse_is_worse_on_either_side() -> None:
    slower, fewer = changes({"median_ms": 10.0, "tokens_per_s": 100.0}, {"median_ms": 12.0, "tokens_per_s": 80.0})
    assert slower.worse_by == pytest.approx(0.2) and fewer.worse_by == pytest.approx(0.2)
    assert table([slower, fewer], 0.05).count("worse") == 2 and "worse" not in table([slower, fewer], 0.25)


def test_files_that_are_none_or_share_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        read(tmp_path / "broken.json")
    (tmp_path / "good.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(UserError, match="share no figure"):
        changes(read(tmp_path / "good.json"), {"b": 2})
