"""The layouts for many GPUs, with everything real, at toy size on a CPU: `--overlay toy` over a recipe's own overlay."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# A process for each rank and engine: on two cores starting them takes minutes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """RL's updates so far."""
    read = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in read if row.get("phase") == "rl" and "actor/pg_loss" in row]


@pytest.mark.parametrize(("overlay", "ranks", "engines"), [("h200x2", 1, 1), ("h200x3_lora", 1, 1), ("h200x4", 2, 1), ("h200x8", 4, 3)])
def test_layout_of_a_recipe_runs_at_toy_size(tmp_path: Path, overlay: str, ranks: int, engines: int) -> None:
    command = [
        sys.executable,
        "-m",
        "mtpctl",
        "train",
        "mimo7b_mtp",
        "--overlay",
        overlay,
        "--overlay",
        "toy",
        "--set",
        f"run_dir={tmp_path}/run",
    ]
    plan = json.loads(subprocess.run([*command, "--dry-run", "--json"], check=True, capture_output=True, text=True, timeout=60).stdout)
    roles = [actor["name"].partition("-")[0] for actor in plan["placement"]["actors"]]
    assert (roles.count("trainer"), roles.count("rollout"), roles.count("logprob")) == (ranks, engines, 1)
    done = subprocess.run([*command, "--plain"], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    updates = rows(tmp_path / "run")
    assert [row["step"] for row in updates] == [1, 2, 3, 4] and not any(row["skipped"] for row in updates)
    assert [row["async/version"] for row in updates] == [2, 3, 4, 5], "a sync after each update, and one before the first"
    assert any(row["rollout/spec_drafted"] for row in updates) and all(row["mtp/loss_1"] > 0 for row in updates)
    same = [row["rollout_corr/abs_diff_same_version"] for row in updates if "rollout_corr/abs_diff_same_version" in row]
    assert same and max(same) < 1e-5, "the trainer's log-probs are the engines' where both have the same weights"


@pytest.mark.parametrize(
    ("recipe", "overlays", "apart"),
    [
        ("qwen3_5_35b_a3b_mtp", ["toy", "toy_qwen3_5"], 0.05),
        ("qwen3_5_35b_a3b_mtp", ["qwen3_5_all_weights", "toy", "toy_qwen3_5"], 0.05),
        ("glm4_5_air_mtp", ["toy", "toy_glm4"], 1e-5),
        ("glm4_7_flash_mtp", ["toy", "toy_glm4_7_flash"], 1e-5),
        ("ernie4_5_21b_a3b_mtp", ["toy", "toy_ernie4_5"], 1e-5),
        ("mimo_v2_flash_mtp", ["toy", "toy_mimo_v2_flash"], 1e-5),
        ("nemotron_3_5_lightning_mtp", ["toy", "toy_nemotron_h"], 1e-5),
    ],
    ids=[
        "qwen3.5-adapter",
        "qwen3.5-all-weights",
        "glm4.5-adapter",
        "glm4.7-flash-adapter",
        "ernie4.5-adapter",
        "mimo-v2-flash-adapter",
        "nemotron-h-adapter",
    ],
)
def test_moe_layout_trains_end_to_end(tmp_path: Path, recipe: str, overlays: list[str], apart: float) -> None:
    """Supervised updates, RL with drafts, scores from a server, every tensor of every sync compared. `apart`: nats, more in bf16."""
    sets = ["train.stages=[sft, rl]", "train.sft.steps=2", "train.sft.batch_size=8", "train.rl.steps=2", "train.rl.prompts_per_step=4"]
    sets += ["sync.verify=always", "logprob.standalone=true", f"run_dir={tmp_path}/run"]
    command = [sys.executable, "-m", "mtpctl", "train", recipe, "--plain"]
    command += [part for overlay in overlays for part in ("--overlay", overlay)] + [part for each in sets for part in ("--set", each)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    updates = rows(tmp_path / "run")
    assert [row["step"] for row in updates] == [1, 2] and not any(row["skipped"] for row in updates)
    assert all(row["moe/dropped"] == 0 and 1 <= row["moe/load_max"] <= 8 for row in updates)
    assert all(0.8 < row["moe/replay_agreement"] <= 1 for row in updates), "the engine's experts, of weights that hardly differ"
    assert all(row["mtp/loss_1"] > 0 for row in updates) and any(row["rollout/spec_drafted"] for row in updates)
    assert all(row["sync/verified"] > 0 for row in updates if "sync/verified" in row)
    same = [row["rollout_corr/abs_diff_same_version"] for row in updates if "rollout_corr/abs_diff_same_version" in row]
    assert same and max(same) < apart
