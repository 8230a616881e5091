"""A reward of one's own through `mtpctl train` for real: from another folder than the recipe's, with parts, a failure and a timeout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_rollout_job import SMALL

pytestmark = pytest.mark.timeout(500)

JUDGE = """\
import time

def score(response, problem, sample, bonus=0.0):
    print("judged", problem.prompt_id)
    if sample.index == 1:
        raise ValueError("no second one")
    if sample.index == 2:
        time.sleep(60)
    assert len(sample.response_ids) == len(sample.loss_mask) == len(sample.behaviour_logprobs)
    return {"reward": len(response) % 2 + bonus, "letters": len(response), "right": problem.answer in response}
"""

RECIPE = """\
reward:
  function: judge.py:score
  args: {bonus: 0.25}
  timeout_s: 1.5
data:
  task: null
  path: rows.jsonl
train:
  stages: [rl]
  eval_every: 0
  rl: {steps: 2, prompts_per_step: 2, group_size: 4, dynamic_sampling: false}
"""


def train(task: Path, run_dir: Path) -> subprocess.CompletedProcess[str]:
    both = [part for text in (*SMALL, f"run_dir={run_dir}", "cluster.num_cpus=2") for part in ("--set", text)]
    command = [sys.executable, "-m", "mtpctl", "train", "tiny_mtp", "--overlay", str(task / "own.yaml"), "--plain", *both]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=run_dir.parent)


def test_a_reward_of_ones_own_trains_and_its_parts_and_failures_are_in_the_metrics(tmp_path: Path) -> None:
    task = tmp_path / "mytask"
    task.mkdir()
    (task / "own.yaml").write_text(RECIPE)
    (task / "judge.py").write_text(JUDGE)
    (task / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(8)))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run_dir = elsewhere / "run"

    done = train(task, run_dir)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if row.get("phase") == "rl" and "reward/mean" in row]
    assert len(updates) == 2
    for row in updates:
        assert row["reward/letters"] > 0 and 0 <= row["reward/right"] <= 1
        assert row["timing_s/reward"] > 0 and row["timing_s/reward_wait"] >= 0 and row["reward/dropped"] == 0
    # Of each group of four one raises and one is late.
    assert sum(row["reward/errors"] for row in updates) >= 8
    assert sum(row["reward/timeouts"] for row in updates) >= 4
    told = [row["message"] for row in rows if row.get("event") == "reward"]
    assert sum(line.startswith("judge.py:6: ValueError: no second one (rows.jsonl:") for line in told) == 1
    assert sum(line.startswith("judge.py:8: score took more than 1.5 s (reward.timeout_s)") for line in told) == 1
    assert "judged rows.jsonl:" in (run_dir / "logs" / "reward.log").read_text()
    assert f"function: {task / 'judge.py'}:score" in (run_dir / "recipe.resolved.yaml").read_text()
