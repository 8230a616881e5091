"""`mtpctl bench async` of existing runs: output, files and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtpctl.cli.app import main
from mtpctl.recipe.loading import load_recipe
from mtpctl.telemetry.metrics_file import Row
from tests.fakes.bench_results import write_run

STEADY, SWINGING, ENDS_HIGH = [0.4, 0.6, 0.7, 0.8, 0.8, 0.8, 0.8], [0.4, 0.8, 0.5, 0.8, 0.4, 0.8, 0.3], [0.4, 0.8, 0.5, 0.8, 0.4, 0.3, 0.8]


def recorded(out: Path, run: str, accuracies: list[float], step_s: float) -> None:
    """A finished run directory with an evaluation every two updates."""
    folder, last = out / run, 2 * len(accuracies) - 2
    recipe = load_recipe("tiny_mtp", sets=[f"run_dir={folder}", "train.stages=[rl]", f"train.rl.steps={last}"]).recipe
    rows = [Row("rl", 2 * i, 1.0, 1, {"eval/accuracy": value}) for i, value in enumerate(accuracies)]
    write_run(folder, recipe, rows + [Row("rl", step, 1.0, 1, {"timing_s/step": step_s}) for step in range(1, last + 1)])


def bench(out: Path, *arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "async", "--measured-only", "--out", str(out), *arguments])
    return int(ended.value.code or 0)


@pytest.mark.parametrize("swings", [SWINGING, ENDS_HIGH])
def test_fast_arm_that_oscillates_misses_the_bound(tmp_path: Path, swings: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """It first reaches the level after half of the synchronous arm's updates."""
    recorded(tmp_path, "synchronous-0", STEADY, 2.0)
    recorded(tmp_path, "partial-0", swings, 1.0)
    assert bench(tmp_path) == 6
    printed = capsys.readouterr()
    assert "| never | never | never | 0.00x |" in printed.out and "speed-up over the synchronous one is 0.00x, bound 1x" in printed.err
    assert bench(tmp_path, "--least-speedup", "0") == 0


def test_speedup_of_an_arm_that_holds_the_level_is_in_seconds(tmp_path: Path) -> None:
    recorded(tmp_path, "synchronous-0", STEADY, 2.0)
    recorded(tmp_path, "partial-0", STEADY, 1.0)
    assert bench(tmp_path, "--least-speedup", "2") == 0 and bench(tmp_path, "--least-speedup", "2.1") == 6


def test_tolerance_changes_the_update_of_a_sustained_level(tmp_path: Path) -> None:
    recorded(tmp_path, "synchronous-0", STEADY, 2.0)
    recorded(tmp_path, "partial-0", [0.4, 0.8, 0.7, 0.8, 0.8, 0.8, 0.8], 1.0)
    assert bench(tmp_path, "--accuracy", "0.75") == 0
    updates = {r["name"]: r["held_updates"] for r in json.loads((tmp_path / "result.json").read_text())["results"]}
    assert updates == {"synchronous": pytest.approx(5), "partial": pytest.approx(5)}
    assert bench(tmp_path, "--accuracy", "0.75", "--tolerance", "0.06") == 0
    updates = {r["name"]: r["held_updates"] for r in json.loads((tmp_path / "result.json").read_text())["results"]}
    assert updates["partial"] == pytest.approx(2 * 0.35 / 0.4)


def test_runs_of_custom_arms_are_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such as those of `mtpctl train --set run_dir=DIR/NAME-SEED`."""
    for seed in (0, 1):
        recorded(tmp_path, f"quickstart-{seed}", STEADY, 2.0)
    assert bench(tmp_path, "--arm", "quickstart:") == 0
    assert "| quickstart | 2 | 40.0% | 80.0% | +40.0 | 80.0% | 0.0 |" in capsys.readouterr().out


def test_default_is_three_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[list[int]] = []

    def ran(self: object, arms: object, seeds: list[int], **_: object) -> list[object]:
        requested.append(list(seeds))
        raise SystemExit(0)

    monkeypatch.setattr("mtpctl.bench.arms.Experiment.run", ran)
    for more in ([], ["--set", "seed=5"], ["--seed", "7"]):
        with pytest.raises(SystemExit):
            main(["bench", "async", "tiny_mtp", "--out", str(tmp_path / "out"), *more])
    assert requested == [[0, 1, 2], [5, 6, 7], [7]]
