"""Starts of `mtpctl train` as processes, with a short version of the tiny recipe."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.fakes.processes import command_line

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny_mtp.yaml"


SETTINGS = (
    "train.sft.steps=6",
    "train.sft.batch_size=16",
    "train.rl.steps={steps}",
    "train.rl.prompts_per_step=4",
    "train.rl.group_size=3",
    "train.rl.dynamic_sampling=false",
    "train.checkpoint_every=2",
    "data.task={{name: addition, max_digits: 2, train_size: 200, eval_size: 8}}",
    "rollout.max_tokens=24",
    "cluster.num_cpus=2",
)


@dataclass
class Start:
    """One start of `mtpctl train` on a run directory, in a separate process group, as a shell would do it."""

    run_dir: Path
    process: subprocess.Popen[str]
    log: Path

    @classmethod
    def of(cls, run_dir: Path, name: str, steps: int, *sets: str, overlay: str | None = None) -> Start:
        log = run_dir.parent / f"{name}.log"
        command = [sys.executable, "-m", "mtpctl", "train", str(RECIPE), "--plain"]
        command += [] if overlay is None else ["--overlay", overlay]
        for text in (f"run_dir={run_dir}", *(text.format(steps=steps) for text in SETTINGS), *sets):
            command += ["--set", text]
        with log.open("w") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, text=True, start_new_session=True, cwd=run_dir.parent
            )
        return cls(run_dir, process, log)

    def rows(self) -> list[dict[str, Any]]:
        """The metrics of the run directory so far."""
        file = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def wait_for(self, met: Callable[[], bool], seconds: float = 270) -> None:
        """Wait until `met`. Fails with the log if the process ends first or the time is up."""
        end = time.monotonic() + seconds
        while not met():
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.2)

    def restarts(self) -> list[str]:
        """The log lines about lost trainers."""
        return [row["message"] for row in self.rows() if row.get("event") == "restart"]

    def step(self, stage: str) -> int:
        """The last step logged of a stage."""
        return max((row["step"] for row in self.rows() if row.get("phase") == stage), default=0)

    def actor(self, name: str) -> psutil.Process:
        """The process of a Ray actor of this run."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in children if f"ray::{name}" in command_line(child))

    def end(self, seconds: float = 120) -> int:
        """The exit code."""
        return self.process.wait(seconds)
