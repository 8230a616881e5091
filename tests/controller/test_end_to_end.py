"""The main job with everything real: Ray, a Megatron-core trainer, vLLM speculating with the MTP head, on a few steps.

Two starts of one run directory cover a whole run with a user-defined reward: one is stopped by Ctrl-C, the next resumes it, loses
its rollout engine, then its trainer, and is killed itself at last.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from mtpctl.telemetry.metrics_file import load_history
from tests.fakes.train_command import Start

# Minutes are for a machine that is busy with something else; on two free cores each test takes about one.
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
OWN = "reward: {function: judge.py:score, args: {bonus: 0.25}, timeout_s: 0.5}\n"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("main-job")
    task = root / "mytask"
    task.mkdir()
    (task / "own.yaml").write_text(OWN)
    (task / "judge.py").write_text(JUDGE)
    return root / "run"


def test_ctrl_c_stops_after_the_step_with_a_checkpoint_and_leaves_no_process_behind(run_dir: Path) -> None:
    start = Start.of(run_dir, "first", steps=200, overlay="mytask/own.yaml")
    start.wait_for(lambda: start.step("rl") >= 2)
    assert start.actor("TrainerRank").environ()["OMP_WAIT_POLICY"] == "PASSIVE", "engines run on the same cores"
    children = psutil.Process(start.process.pid).children(recursive=True)
    os.killpg(start.process.pid, signal.SIGINT)
    assert start.end() == 130, start.log.read_text()
    assert (run_dir / "checkpoints" / "latest").exists()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
    assert "Traceback" not in start.log.read_text()


def test_resumed_run_survives_the_death_of_its_engine_and_trainer(run_dir: Path) -> None:
    start = Start.of(run_dir, "resumed", steps=200, overlay="mytask/own.yaml")
    stopped_at = start.step("rl")
    start.wait_for(lambda: start.step("rl") > stopped_at)
    assert [row["step"] for row in start.rows() if row.get("phase") == "sft" and "sft/loss" in row] == [1, 2, 3, 4, 5, 6]
    start.actor("RolloutActor").kill()
    killed_at = start.step("rl")
    start.wait_for(lambda: start.step("rl") >= killed_at + 3)
    start.actor("TrainerRank").kill()
    killed_at = start.step("rl")
    start.wait_for(lambda: any(line.startswith("trainer back after ") for line in start.restarts()), 120)
    failed, back, lost, *_ = start.restarts()
    assert failed.startswith("rollout replica 0 failed: EngineDead: ") and back == "rollout replica 0 is back"
    assert lost.startswith("trainer rank 0, ")
    start.wait_for(lambda: start.step("rl") >= killed_at + 2)
    assert "Traceback" not in start.log.read_text()
    actors = [start.actor("TrainerRank"), start.actor("RolloutActor")]
    start.process.kill()
    _, alive = psutil.wait_procs(actors, timeout=30)
    assert not alive, "actors end with the command"


def test_metrics_have_every_update_and_event(run_dir: Path) -> None:
    """Updates that were lost with the trainer are made and reported again."""
    message = [row for row in load_history(run_dir).rows if row.phase == "rl" and "reward/mean" in row.metrics]
    assert [row.step for row in message] == list(range(1, len(message) + 1)), "over stop, resume and deaths"
    assert message
    updates = [row.metrics for row in message]
    for name in ("mtp/loss_1", "mtp/grad_norm", "rollout/spec_accept_rate", "async/trainer_idle", "rollout_corr/kl"):
        assert all(name in row for row in updates), name
    # The command may have been killed in the sync after its last update.
    assert all("sync/seconds" in row for row in updates[:-1])
    assert max(row["rollout_corr/abs_diff_same_version"] for row in updates if "rollout_corr/abs_diff_same_version" in row) < 1e-4


def test_user_defined_reward_logs_its_parts_and_failures(run_dir: Path) -> None:
    """Its file is in the folder of the overlay that names it, and the command was started from another folder."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if row.get("phase") == "rl" and "reward/mean" in row]
    for row in updates:
        assert row["reward/letters"] > 0 and 0 <= row["reward/right"] <= 1 and row["reward/dropped"] == 0
        assert row["timing_s/reward"] >= 0 and row["timing_s/reward_wait"] >= 0
    assert sum(row["timing_s/reward"] for row in updates) > 0
    # Of each group of three one raises and one is late; those between the last update and a stop are in no row.
    steps = len({row["step"] for row in updates})
    assert sum(row["reward/errors"] for row in updates) >= 4 * steps
    assert sum(row["reward/timeouts"] for row in updates) >= 2 * steps
    message = [row["message"] for row in rows if row.get("event") == "reward"]
    assert any(line.startswith("judge.py:6: ValueError: no second one (") for line in message)
    assert any(line.startswith("judge.py:8: score took more than 0.5 s (reward.timeout_s)") for line in message)
    assert "judged addition" in (run_dir / "logs" / "reward.log").read_text()
    assert f"function: {run_dir.parent / 'mytask' / 'judge.py'}:score" in (run_dir / "recipe.resolved.yaml").read_text()
