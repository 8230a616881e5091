"""The main job with replicas that come and go while it trains, all of it real: each sync is verified, each prompt trained on once."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from mtpctl.telemetry.sample_log import read_samples
from tests.controller.test_end_to_end import Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GROUPS, SIZE = 4, 3  # of a batch, as the settings of the main job have them
SETS = (
    "data.task={name: addition, max_digits: 3, train_size: 20000, eval_size: 8}",
    "rollout.replicas={min: 1, max: 2}",
    "cluster.num_cpus=3",
    "sync.verify=always",
    "train.eval_every=0",
    f"telemetry.samples={GROUPS * SIZE}",
    "telemetry.http=0",
)


def scale(run: Path, replicas: int) -> str:
    """What the run answers."""
    command = [sys.executable, "-m", "mtpctl", "scale", str(run), "--replicas", str(replicas)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_is_scaled_while_it_trains_and_trains_every_prompt_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    start = Start.of(run, "scaled", 1_000_000, *SETS)

    def told(line: str) -> int:
        return sum(row.get("message") == line for row in start.rows())

    def serving() -> list[int]:
        return [int(row["rollout/replicas"]) for row in start.rows() if "rollout/replicas" in row]

    def trains_on(replicas: int) -> None:
        """Until three updates more were made with so many replicas."""
        before = len(serving())
        start.wait_for(lambda: serving()[before:].count(replicas) >= 3)

    try:
        start.wait_for(lambda: told("replica 1 serves") == 1)
        trains_on(2)
        assert scale(run, 1) == "1 replica(s) are asked for, and 2 serve\n"
        start.wait_for(lambda: told("replica 1 has left") == 1, 60)
        trains_on(1)
        assert scale(run, 2) == "2 replica(s) are asked for, and 1 serve\n"
        start.wait_for(lambda: told("replica 1 serves") == 2)
        trains_on(2)
        start.process.send_signal(signal.SIGINT)
        assert start.end() == 130, start.log.read_text()
    finally:
        start.process.kill()
        start.process.wait()
    rows = [row for row in start.rows() if row.get("phase") == "rl" and "reward/mean" in row]
    assert not [row for row in start.rows() if row.get("event") in ("restart", "error", "alarm")], "nobody has failed"
    assert all(row["sync/verified"] > 0 for row in rows)
    assert all(row["async/staleness_max"] <= 8 for row in rows)

    trained = [row for row in read_samples(run) if row["kind"] == "update"]
    steps = [row["step"] for row in rows]
    assert steps == list(range(1, len(steps) + 1))
    assert Counter(row["step"] for row in trained) == dict.fromkeys(steps, GROUPS * SIZE)
    assert len({(row["prompt_id"], row["index"]) for row in trained}) == len(trained), "no prompt is trained on twice"
    assert set(Counter(row["prompt_id"] for row in trained).values()) == {SIZE}
    for row in trained:
        versions = [version for _, _, version in row["versions"]]
        assert versions == sorted(versions) and versions[-1] < row["step"] + 1
        assert [begin for begin, _, _ in row["versions"]] == [0, *(end for _, end, _ in row["versions"][:-1])]
        assert row["versions"][-1][1] == row["tokens"]
