"""A whole run whose checkpoints were damaged and whose pointer is lost ends with the weights of the undisturbed run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mtpctl.checkpoint.finding import damaged_in, newest_checkpoint
from mtpctl.telemetry.metrics_file import load_history
from tests.fakes.checkpoint_folders import flip

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny_mtp.yaml"
SETTINGS = (
    "train.stages=[sft]",
    "train.sft.batch_size=8",
    "train.sft.until_loss=0",
    "train.checkpoint_every=3",
    "train.threads=1",
    "data.task={name: addition, max_digits: 2, train_size: 200, eval_size: 8}",
    "cluster.num_cpus=2",
)


def mtpctl(*arguments: str) -> str:
    """Run a command that has to succeed. Returns what it prints."""
    done = subprocess.run([sys.executable, "-m", "mtpctl", *arguments], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout + done.stderr


def train(run: Path, steps: int) -> str:
    sets = (f"run_dir={run}", f"train.sft.steps={steps}", "async.deterministic=true", *SETTINGS)
    return mtpctl("train", str(RECIPE), "--plain", *(part for each in sets for part in ("--set", each)))


def weights(run: Path) -> bytes:
    mtpctl("convert-hf", str(run), str(run.parent / f"{run.name}.hf"))
    return (run.parent / f"{run.name}.hf" / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_run_with_a_damaged_checkpoint_resumes_from_the_previous_one_with_equal_weights(tmp_path: Path) -> None:
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    train(undisturbed, 6)
    train(run, 4)
    root = run / "checkpoints"
    assert newest_checkpoint(root) == root / "sft-000004-end"
    shard = next((root / "sft-000004-end").glob("*.distcp"))
    for place in range(20):
        flip(shard, shard.stat().st_size // 2 + 64 * place)
    (root / "latest").unlink()
    message = train(run, 6)
    lines = [line for line in message.splitlines() if "has changed since it was saved" in line]
    assert len(lines) == 1 and lines[0].endswith("sft-000003 is used instead; sft-000004-end is kept under another name")
    assert "sft resumes after step 3, from sft-000003" in message
    assert [path.name for path in damaged_in(root)] == ["sft-000004-end.damaged"]
    assert [row.step for row in load_history(run).rows] == [1, 2, 3, 4, 5, 6]
    assert weights(run) == weights(undisturbed)
