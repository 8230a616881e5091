"""A run of `mtpctl train` with an adapter, as a process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny_mtp.yaml"


SETTINGS = {
    "train.lora": "{rank: 4, alpha: 8}",
    "sync.sections": "[adapter, draft]",
    "sync.verify": "always",
    # The adapter's tensors come over many buckets; some are cut.
    "sync.bucket_bytes": "4096",
    "logprob.standalone": "true",
    "train.sft.steps": "4",
    "train.sft.batch_size": "16",
    "train.rl.steps": "200",
    "train.rl.prompts_per_step": "4",
    "train.rl.group_size": "2",
    "train.rl.dynamic_sampling": "false",
    # Something to learn whatever the rewards are.
    "train.rl.entropy_coef": "0.05",
    "train.rl.optimizer": "{lr: 1e-2, warmup_steps: 0}",
    "train.checkpoint_every": "1",
    "data.task": "{name: addition, max_digits: 2, train_size: 200, eval_size: 8}",
    "rollout.max_tokens": "24",
    "cluster.num_cpus": "2",
}


class Start:
    """One start of the run."""

    def __init__(self, run_dir: Path, log: Path, settings: Mapping[str, str] = SETTINGS) -> None:
        self.run_dir, self.log = run_dir, log
        sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "mtpctl", "train", str(RECIPE), "--plain", "--set", f"run_dir={run_dir}", *sets]
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)

    def steps(self) -> list[dict[str, Any]]:
        """Rows of the policy updates so far."""
        file = self.run_dir / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [row for row in rows if row.get("phase") == "rl" and "sync/seconds" in row]

    def wait_for(self, steps: int, seconds: float = 200) -> None:
        """Wait for this number of updates."""
        until = time.monotonic() + seconds
        while len(self.steps()) < steps:
            assert self.process.poll() is None and time.monotonic() < until, self.log.read_text()
            time.sleep(0.1)

    def engine(self) -> psutil.Process:
        """The rollout engine's process."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in children if "ray::RolloutActor" in " ".join(child.cmdline()))

    def stop(self) -> None:
        """Request a stop, and wait for the end."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(120) == 143, self.log.read_text()
        assert "Traceback" not in self.log.read_text()
