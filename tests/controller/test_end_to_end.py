"""The main job with everything real: Ray, a Megatron-core trainer, vLLM speculating with the MTP head, on a few steps.

Three starts of one run directory tell the whole story: one is stopped by Ctrl-C, the next resumes it and loses its
rollout engine on the way, the last loses its trainer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

# Minutes are for a machine that is busy with something else; on two free cores each test takes about one.
pytestmark = pytest.mark.timeout(500)

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny_mtp.yaml"
SETTINGS = (
    "train.sft.steps=6",
    "train.sft.batch_size=16",
    "train.rl.steps={steps}",
    "train.rl.prompts_per_step=4",
    "train.rl.group_size=2",
    "train.rl.dynamic_sampling=false",
    "train.checkpoint_every=2",
    "data.task={{name: addition, max_digits: 2, train_size: 200, eval_size: 8}}",
    "rollout.max_tokens=24",
    "cluster.num_cpus=2",
)


@dataclass
class Start:
    """One start of `mtpctl train` on a run directory, in a process group of its own, as a shell would do it."""

    run_dir: Path
    process: subprocess.Popen[str]
    log: Path

    @classmethod
    def of(cls, run_dir: Path, name: str, steps: int) -> Start:
        log = run_dir.parent / f"{name}.log"
        sets = [part for text in SETTINGS for part in ("--set", text.format(steps=steps))]
        command = [sys.executable, "-m", "mtpctl", "train", str(RECIPE), "--plain", "--set", f"run_dir={run_dir}", *sets]
        with log.open("w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, text=True, start_new_session=True)
        return cls(run_dir, process, log)

    def rows(self) -> list[dict[str, Any]]:
        """The metrics of the run directory so far."""
        file = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def wait_for(self, met: Callable[[], bool], seconds: float = 270) -> None:
        """Until `met`, failing with the log where the process ends first or the time is up."""
        end = time.monotonic() + seconds
        while not met():
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.2)

    def step(self, stage: str) -> int:
        """The last step logged of a stage."""
        return max((row["step"] for row in self.rows() if row.get("phase") == stage), default=0)

    def actor(self, name: str) -> psutil.Process:
        """The process of a Ray actor of this run."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in children if f"ray::{name}" in " ".join(child.cmdline()))

    def end(self, seconds: float = 120) -> int:
        """The exit code."""
        return self.process.wait(seconds)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("main-job") / "run"


def test_ctrl_c_stops_after_the_step_with_a_checkpoint_and_leaves_no_process_behind(run_dir: Path) -> None:
    start = Start.of(run_dir, "first", steps=200)
    start.wait_for(lambda: start.step("rl") >= 2)
    children = psutil.Process(start.process.pid).children(recursive=True)
    os.killpg(start.process.pid, signal.SIGINT)
    assert start.end() == 130, start.log.read_text()
    assert (run_dir / "checkpoints" / "latest").exists()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
    assert "Traceback" not in start.log.read_text()


def test_the_same_command_resumes_and_survives_the_death_of_its_rollout_engine(run_dir: Path) -> None:
    before = Start.of(run_dir, "resumed", steps=200)
    stopped_at = before.step("rl")
    before.wait_for(lambda: before.step("rl") > stopped_at)
    assert [row["step"] for row in before.rows() if row.get("phase") == "sft" and "sft/loss" in row] == [1, 2, 3, 4, 5, 6]
    engine = before.actor("RolloutActor")
    engine.kill()
    killed_at = before.step("rl")
    before.wait_for(lambda: before.step("rl") >= killed_at + 3)
    before.process.terminate()  # SIGTERM, as a scheduler sends it, asks for the same clean stop
    assert before.end() == 130, before.log.read_text()
    steps = [row["step"] for row in before.rows() if row.get("phase") == "rl" and "reward/mean" in row]
    assert steps == list(range(1, len(steps) + 1)), "every step once, over stop, resume and the engine's death"


def test_the_death_of_the_trainer_ends_the_run_with_its_name_and_the_finished_run_tells_what_it_did(run_dir: Path) -> None:
    start = Start.of(run_dir, "last", steps=200)
    reached = start.step("rl")
    start.wait_for(lambda: start.step("rl") > reached)
    trainer = start.actor("TrainerRank")
    died = time.monotonic()
    trainer.kill()
    assert start.end(60) == 5, start.log.read_text()
    assert time.monotonic() - died < 60
    assert "error: trainer rank 0" in start.log.read_text()
    assert "Traceback" not in start.log.read_text()
    rl = [row for row in start.rows() if row.get("phase") == "rl" and "reward/mean" in row]
    for name in ("mtp/loss_1", "mtp/grad_norm", "rollout/spec_accept_rate", "async/trainer_idle", "rollout_corr/kl"):
        assert all(name in row for row in rl), name
    # The trainer may have died in the sync after its last update.
    assert all("sync/seconds" in row for row in rl[:-1])
    assert max(row["rollout_corr/abs_diff_same_version"] for row in rl if "rollout_corr/abs_diff_same_version" in row) < 1e-4
