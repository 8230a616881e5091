"""Same seed and `async.deterministic: true`: the same run twice, to the last bit of every loss."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mtpctl.telemetry.metrics_file import load_history
from tests.fakes.family_runs import command, recipe
from tests.fakes.train_command import RECIPE, SETTINGS

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
def test_deterministic_runs_are_equal(tmp_path: Path) -> None:
    first, second = losses(tmp_path / "first"), losses(tmp_path / "second")
    assert first == second
    assert len(first["actor/grad_norm"]) == 5
    assert min(first["actor/grad_norm"]) > 0


COMPUTED = ("actor/", "mtp/", "moe/", "sft/", "reward/mean", "response/", "rollout/spec_accept", "rollout_corr/")
"""Metrics that no clock is part of."""


def computed(root: Path) -> list[dict[str, Any]]:
    """The rows of a run of a mixture of experts: two context-parallel ranks, and three drafts a step of one MTP layer."""
    path = recipe("glm4-moe", "fp32", "cpu", root)
    tree: dict[str, Any] = yaml.safe_load(path.read_text())
    tree["async"] = {"deterministic": True}
    tree["mtp"] = {"repeat": 3}
    tree["train"] |= {"parallel": {"cp": 2}, "checkpoint_every": 0}
    tree["train"]["rl"] |= {"steps": 3, "entropy_coef": 0.01}
    tree["rollout"]["speculation"] = {"num_tokens": 3}
    del tree["logprob"]
    path.write_text(yaml.safe_dump(tree))
    command("-m", "mtpctl", "train", path, "--plain")
    rows = [json.loads(line) for line in (root / "run" / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if any(name.startswith(COMPUTED) for name in row)]
    return [{name: value for name, value in row.items() if name in ("phase", "step") or name.startswith(COMPUTED)} for row in updates]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_deterministic_moe_runs_with_context_parallelism_are_equal(tmp_path: Path) -> None:
    roots = [tmp_path / name for name in ("first", "second")]
    for root in roots:
        root.mkdir()
    first, second = (computed(root) for root in roots)
    assert first == second
    updates = [row for row in first if row["phase"] == "rl" and "actor/grad_norm" in row]
    assert len(updates) == 3
    assert all(row["actor/grad_norm"] > 0 and row["mtp/loss_3"] > 0 and "moe/replay_agreement" in row for row in updates)
