"""The engine passes every case of the MTP conformance test, and megatron-core fails the cases that the docs name."""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from typing import cast

import pytest
import torch

from mtp_conformance import CASES, FAILED, PINS, VOCAB, Case, Convention, Result, main, pins, reference, verdict

ROOT = Path(__file__).parents[2]
LOCAL_COUNTS = {"uneven microbatches", "uneven ranks", "uneven ranks, detached, tied", "rank with nothing to draft", "cp 2", "cp 2, packed"}
UNPADDED_ROLL = {"packed, padded", "cp 2, packed, padded"}


def run_script(trainer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict[str, str]]]:
    """The exit code, and for each trainer of the file its result by case."""
    monkeypatch.setattr(sys, "argv", ["mtp_conformance.py", "--trainer", str(ROOT / trainer)])
    with pytest.raises(SystemExit) as end:
        main()
    printed = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("|")][2:]
    assert [row[0] for row in rows] == [case.name for case in CASES], printed
    return cast(int, end.value.code), [{row[0]: row[column] for row in rows} for column in range(1, len(rows[0]))]


def test_reference_matches_the_pinned_results() -> None:
    pinned = json.loads(PINS.read_text())
    computed = pins()
    assert computed.keys() == pinned.keys()
    for name, entry in computed.items():
        assert entry["losses"] == pytest.approx(pinned[name]["losses"], rel=1e-10), name
        assert entry["gradients"].keys() == pinned[name]["gradients"].keys()
        for tensor, values in entry["gradients"].items():
            assert values == pytest.approx(pinned[name]["gradients"][tensor], rel=1e-9, abs=1e-12), f"{name}: {tensor}"


@pytest.mark.parametrize(("supervised", "counts"), [("target", [9, 9]), ("chain", [7, 5])])
def test_supervised_rows_of_two_turns(supervised: str, counts: list[int]) -> None:
    """Turns of four and five tokens: a chain loses the first k tokens of each turn, a target none."""
    convention = Convention(supervised, "normed")  # type: ignore[arg-type]
    (sample,) = next(case for case in CASES if case.name == "two turns").samples()
    rows = [sum(convention.counts(sample.mask, row, k) for row in range(len(sample.tokens) - k - 1)) for k in (1, 2)]
    assert rows == counts


def test_head_of_zeros_predicts_all_tokens_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[0]
    weights = case.weights()
    monkeypatch.setattr(type(case), "weights", lambda self: weights | {"head": torch.zeros_like(weights["head"])})
    result = reference(case, Convention("chain", "normed"))
    assert result.losses == pytest.approx([math.log(VOCAB)])
    assert result.gradients["head"].any() and not result.gradients["1.norm"].any()


def test_engine_passes_all_cases(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, (engine,) = run_script("tests/fakes/conformance_trainer.py", monkeypatch, capsys)
    assert set(engine.values()) == {"pass"}, engine
    assert code == 0


def mean_of_local_means(case: Case, convention: Convention, monkeypatch: pytest.MonkeyPatch) -> Result:
    """What a trainer computes that divides each microbatch by its own count, and averages microbatches and ranks."""
    results = []
    for row in [row for rows in case.rows() for row in rows]:
        with monkeypatch.context() as patch:
            patch.setattr(Case, "rows", lambda self, row=row: [[row]])
            results.append(reference(case, convention))
    losses = [statistics.mean(depth) for depth in zip(*(result.losses for result in results), strict=True)]
    gradients = {name: torch.stack([result.gradients[name] for result in results]).mean(0) for name in case.weights()}
    return Result(losses, gradients)


@pytest.mark.slow
def test_megatron_core_normalizes_by_local_counts_and_rolls_without_padding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If an upgrade fixes a case, update the table of docs/benchmarks/mtp-conformance.md."""
    code, (default, per_token) = run_script("benchmarks/conformance/megatron_core.py", monkeypatch, capsys)
    assert {case for case, verdict in default.items() if verdict != "pass"} == LOCAL_COUNTS | UNPADDED_ROLL, default
    assert {case for case, verdict in per_token.items() if verdict != "pass"} == LOCAL_COUNTS | UNPADDED_ROLL, per_token
    assert code == FAILED
    convention = Convention("target", "normed")
    for case in CASES:
        if case.name.startswith("uneven"):
            local = mean_of_local_means(case, convention, monkeypatch)
            assert default[case.name] == verdict(local, reference(case, convention))
