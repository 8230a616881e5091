"""The main job over three hosts, which are raylets of this machine: two data-parallel trainer ranks and an engine, each on a host.

The host of a rank is killed; the run goes on with the rank that is left, and the engine has not stopped meanwhile.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.train_command import RECIPE, SETTINGS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
BACK_S = 120.0


@pytest.fixture
def hosts() -> Iterator[Any]:
    """Three raylets of one CPU each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=1, wait=False)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


def test_run_continues_after_losing_the_host_of_a_trainer_rank(hosts: Any, tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    sets = [text.format(steps=8) for text in SETTINGS if not text.startswith("cluster.num_cpus")]
    sets += ["train.parallel.dp=2", "train.min_dp=1", f"cluster.address={hosts.address}", f"run_dir={run}"]
    command = [sys.executable, "-m", "mtpctl", "train", str(RECIPE), "--plain", *(part for text in sets for part in ("--set", text))]

    def rows() -> list[dict[str, Any]]:
        file = run / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def events(kind: str) -> list[str]:
        return [row["message"] for row in rows() if row.get("event") == kind]

    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    def wait_for(met: Callable[[], object], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not met():
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.2)

    try:
        wait_for(lambda: any(row.get("phase") == "rl" and row.get("step") == 3 for row in rows()), 240)
        (line,) = [line for line in events("start") if line.startswith("placement: ")]
        names = [part.split(": ")[1] for part in line.removeprefix("placement: ").split("; ")]
        assert names == ["trainer-0", "trainer-1", "rollout-0"]
        node = line.split("; ")[1].split(": ")[0].rpartition("/")[2]
        lost = next(each for each in hosts.worker_nodes if each.node_id.startswith(node))
        before = time.monotonic()
        lost.kill_raylet()
        wait_for(lambda: any(line.startswith("trainer back") for line in events("restart")), BACK_S)
        assert time.monotonic() - before < BACK_S
        assert process.wait(200) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    back = next(line for line in events("restart") if line.startswith("trainer back"))
    assert back.startswith("trainer back with 1 of 2 ranks after ")
    steps = [row["step"] for row in rows() if row.get("phase") == "rl" and "reward/mean" in row]
    assert sorted(set(steps)) == list(range(1, 9)) and steps[-1] == 8
