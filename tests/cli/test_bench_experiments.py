"""`mtpctl bench async` of runs that are there: what it prints and writes, and what it exits with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtpctl.cli.app import main
from mtpctl.recipe.loading import dump_resolved, load_recipe
from mtpctl.telemetry.versions import collect_versions

STEADY, SWINGING, ENDS_HIGH = [0.4, 0.6, 0.7, 0.8, 0.8, 0.8, 0.8], [0.4, 0.8, 0.5, 0.8, 0.4, 0.8, 0.3], [0.4, 0.8, 0.5, 0.8, 0.4, 0.3, 0.8]


def recorded(out: Path, run: str, accuracies: list[float], step_s: float) -> None:
    """A finished run directory with an evaluation every two updates."""
    folder = out / run
    folder.mkdir(parents=True)
    made = load_recipe("tiny_mtp", sets=[f"run_dir={folder}", "train.stages=[rl]", f"train.rl.steps={2 * len(accuracies) - 2}"])
    (folder / "recipe.resolved.yaml").write_text(dump_resolved(made.recipe))
    (folder / "versions.json").write_text(json.dumps(collect_versions()))
    rows = [{"step": 2 * i, "eval/accuracy": value} for i, value in enumerate(accuracies)]
    rows += [{"step": step, "timing_s/step": step_s} for step in range(1, 2 * len(accuracies) - 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"session": 1, "time": 1.0, "phase": "rl", **row}) + "\n" for row in rows))


def bench(out: Path, *arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "async", "--measured-only", "--out", str(out), *arguments])
    return int(ended.value.code or 0)


@pytest.mark.parametrize("swings", [SWINGING, ENDS_HIGH])
def test_an_arm_that_is_fast_and_swings_does_not_pass(tmp_path: Path, swings: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """It crosses the level in half of the synchronous arm's updates."""
    recorded(tmp_path, "synchronous-0", STEADY, 2.0)
    recorded(tmp_path, "partial-0", swings, 1.0)
    assert bench(tmp_path) == 6
    told = capsys.readouterr()
    assert "| never | never | 0.00x |" in told.out and "0.00x as soon as the synchronous one, bound 1x" in told.err
    assert bench(tmp_path, "--least-speedup", "0") == 0


def test_an_arm_that_holds_it_passes_by_its_seconds(tmp_path: Path) -> None:
    recorded(tmp_path, "synchronous-0", STEADY, 2.0)
    recorded(tmp_path, "partial-0", STEADY, 1.0)
    assert bench(tmp_path, "--least-speedup", "2") == 0 and bench(tmp_path, "--least-speedup", "2.1") == 6


def test_the_tolerance_is_asked_for(tmp_path: Path) -> None:
    recorded(tmp_path, "synchronous-0", STEADY, 2.0)
    recorded(tmp_path, "partial-0", [0.4, 0.8, 0.7, 0.8, 0.8, 0.8, 0.8], 1.0)
    assert bench(tmp_path, "--accuracy", "0.75") == 0
    held = {r["name"]: r["held_updates"] for r in json.loads((tmp_path / "result.json").read_text())["results"]}
    assert held == {"synchronous": pytest.approx(5), "partial": pytest.approx(5)}
    assert bench(tmp_path, "--accuracy", "0.75", "--tolerance", "0.06") == 0
    held = {r["name"]: r["held_updates"] for r in json.loads((tmp_path / "result.json").read_text())["results"]}
    assert held["partial"] == pytest.approx(2 * 0.35 / 0.4)


def test_runs_of_arms_of_ones_own_are_read_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The quickstart's, say, as `mtpctl train --set run_dir=DIR/NAME-SEED` left them."""
    for seed in (0, 1):
        recorded(tmp_path, f"quickstart-{seed}", STEADY, 2.0)
    assert bench(tmp_path, "--arm", "quickstart:") == 0
    assert "| quickstart | 2 | 40.0% | 80.0% | +40.0 | – | 80.0% | 0.0 |" in capsys.readouterr().out


def test_three_seeds_are_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []

    def ran(self: object, arms: object, seeds: list[int], **_: object) -> list[object]:
        asked.append(list(seeds))
        raise SystemExit(0)

    monkeypatch.setattr("mtpctl.bench.arms.Experiment.run", ran)
    for more in ([], ["--set", "seed=5"], ["--seed", "7"]):
        with pytest.raises(SystemExit):
            main(["bench", "async", "tiny_mtp", "--out", str(tmp_path / "out"), *more])
    assert asked == [[0, 1, 2], [5, 6, 7], [7]]
