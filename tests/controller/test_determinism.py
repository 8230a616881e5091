"""Same seed and `async.deterministic: true`: the same run twice, to the last bit of every loss."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mtpctl.telemetry.history import load_history
from tests.controller.test_end_to_end import RECIPE, SETTINGS

# An entropy bonus gives every update a gradient, although a model this raw is never rewarded.
DETERMINISTIC = ("async.deterministic=true", "train.rl.entropy_coef=0.01")


def losses(run_dir: Path) -> dict[str, list[float]]:
    sets = [part for text in (*SETTINGS, *DETERMINISTIC) for part in ("--set", text.format(steps=5))]
    command = [sys.executable, "-m", "mtpctl", "train", str(RECIPE), "--plain", "--set", f"run_dir={run_dir}", *sets]
    subprocess.run(command, check=True, capture_output=True, timeout=280)
    history = load_history(run_dir)
    names = (("sft/loss", "sft"), ("actor/grad_norm", "rl"), ("mtp/loss_1", "rl"), ("actor/entropy", "rl"), ("response/length_mean", "rl"))
    return {name: [value for _, value in history.series(name, phase)] for name, phase in names}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_deterministic_runs_are_the_same(tmp_path: Path) -> None:
    first, second = losses(tmp_path / "first"), losses(tmp_path / "second")
    assert first == second
    assert len(first["actor/grad_norm"]) == 5
    assert min(first["actor/grad_norm"]) > 0
