"""Several runs on one page: curves over each other, keys that differ."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mtpctl.errors import UserError
from mtpctl.telemetry.compare import write_comparison
from tests.telemetry.test_report import read


def run(path: Path, lr: float, gain: float, steps: int = 10) -> Path:
    path.mkdir(parents=True)
    (path / "recipe.resolved.yaml").write_text(f"name: {path.name}\nrun_dir: {path}\nseed: 3\ntrain:\n  rl:\n    optimizer: {{lr: {lr}}}\n")
    rows = [{"phase": "rl", "step": s, "reward/mean": gain * s, "actor/entropy": 0.5} for s in range(1, steps + 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps({"session": 1, "time": 1.7e9 + r["step"], **r}) + "\n" for r in rows))
    return path


def test_comparison_shows_curves_and_recipe_differences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [run(tmp_path / "a", 1e-4, 0.05), run(tmp_path / "b", 1e-3, 0.1, steps=8)]
    path = write_comparison(runs)
    assert path == Path("compare.html")
    page, html = read(path), path.read_text()
    text = " ".join(page.text)
    assert page.addresses == [] and "script" not in page.tags
    assert "train.rl.optimizer.lr 0.0001 0.001" in text and "seed" not in text and "run_dir" not in text
    titles = re.findall(r"<h3>(.*?)</h3>", html)
    assert titles == ["Reward", "Entropy"]
    reward = html[html.index("<h3>Reward</h3>") :]
    assert {"a", "b"} <= set(re.findall(r'class="label k\d"[^>]*>(\w)<b>', reward[: reward.index("<h3>Entropy</h3>")]))


def test_last_evaluation_and_late_mean_have_separate_rows(tmp_path: Path) -> None:
    runs = [run(tmp_path / name, 1e-4, 0.05) for name in ("a", "b")]
    for path, last in zip(runs, (0.75, 0.5), strict=True):
        accuracies = {0: 0.25, 4: 0.25, 6: 0.25, 8: 0.25, 10: last}
        rows = [{"session": 1, "time": 1.8e9 + s, "phase": "rl", "step": s, "eval/accuracy": value} for s, value in accuracies.items()]
        rows.insert(0, {"session": 1, "time": 1.6e9, "phase": "sft", "step": 30, "sft/loss": 1.0})
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = " ".join(read(write_comparison(runs, tmp_path / "out.html")).text)
    assert "correct final answer. eval/accuracy 75.0% 50.0%" in text
    assert "mean of the last 4 evaluations. eval/accuracy 37.5% 31.2%" in text
    assert "a: 30 SFT steps, 10 RL steps · b: 30 SFT steps, 10 RL steps" in text


def test_runs_of_one_stage_other_than_rl_are_compared(tmp_path: Path) -> None:
    runs = [run(tmp_path / name, 1e-4, 0.05) for name in ("a", "b")]
    for path in runs:
        rows = [{"session": 1, "time": 1.8e9 + s, "phase": "draft", "step": s, "mtp/loss_1": 1.0 / s} for s in range(1, 5)]
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    html = write_comparison(runs, tmp_path / "out.html").read_text()
    assert re.findall(r"<h3>(.*?)</h3>", html) == ["MTP loss"]


def test_runs_with_equal_names_are_distinguished_by_folders(tmp_path: Path) -> None:
    runs = [run(tmp_path / "x" / "tiny", 1e-4, 0.05), run(tmp_path / "y" / "tiny", 1e-4, 0.05)]
    text = " ".join(read(write_comparison(runs, tmp_path / "out.html")).text)
    assert "x/tiny" in text and "y/tiny" in text and "No key differs." in text


def test_invalid_comparison_is_one_line_error(tmp_path: Path) -> None:
    one = run(tmp_path / "a", 1e-4, 0.05)
    with pytest.raises(UserError, match=r"^RUN: the same run is named twice"):
        write_comparison([one, one])
    with pytest.raises(UserError, match=r"^RUN: no directory .*/no; "):
        write_comparison([one, tmp_path / "no"])
    with pytest.raises(UserError, match=r"^RUN: 8 runs are more than the 7"):
        write_comparison([one] * 8)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"/empty has no metrics yet; "):
        write_comparison([one, tmp_path / "empty"])
