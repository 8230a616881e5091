"""Real replicas join and leave during training: each sync is verified, and each prompt is trained on once."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtpctl.telemetry.sample_log import read_samples
from tests.fakes.train_command import Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GROUPS, SIZE = 4, 3  # of a batch, as the settings of the main job have them
SETS = (
    "data.task={name: addition, max_digits: 3, train_size: 20000, eval_size: 8}",
    "sync.verify=always",
    "train.eval_every=0",
    f"telemetry.samples={GROUPS * SIZE}",
    "telemetry.http=0",
)


class Scaled(Start):
    """A run whose number of replicas changes, and the status requests during it."""

    def count_lines(self, line: str) -> int:
        """How often the run has logged this line since its start."""
        return sum(row.get("message", "").startswith(line) for row in self.rows())

    def serving(self) -> list[int]:
        """The replicas at each update."""
        return [int(row["rollout/replicas"]) for row in self.rows() if "rollout/replicas" in row]

    def trains_on(self, replicas: int) -> None:
        """Wait until three more updates were applied with this number of replicas."""
        before = len(self.serving())
        self.wait_for(lambda: self.serving()[before:].count(replicas) >= 3)

    def scale(self, replicas: int) -> str:
        """What the run answers."""
        command = [sys.executable, "-m", "mtpctl", "scale", str(self.run_dir), "--replicas", str(replicas)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def stopped(self) -> None:
        """Stop it, in order."""
        self.process.send_signal(signal.SIGINT)
        assert self.end() == 130, self.log.read_text()

    def assert_trained_once(self) -> None:
        """Every update has its groups, none twice, all verified, and every token a version that was published before it."""
        rows = [row for row in self.rows() if row.get("phase") == "rl" and "reward/mean" in row]
        assert all(row["sync/verified"] > 0 for row in rows)
        trained = [row for row in read_samples(self.run_dir) if row["kind"] == "update"]
        steps = [row["step"] for row in rows]
        assert steps == list(range(1, len(steps) + 1))
        assert Counter(row["step"] for row in trained) == dict.fromkeys(steps, GROUPS * SIZE)
        assert len({(row["prompt_id"], row["index"]) for row in trained}) == len(trained), "no prompt is trained on twice"
        assert set(Counter(row["prompt_id"] for row in trained).values()) == {SIZE}
        for row in trained:
            ends = [end for _, end, _ in row["versions"]]
            versions = [version for _, _, version in row["versions"]]
            assert [begin for begin, _, _ in row["versions"]] == [0, *ends[:-1]] and ends[-1] == row["tokens"]
            assert versions == sorted(versions) and versions[-1] <= row["step"]


@contextlib.contextmanager
def scaled(run: Path, *sets: str) -> Iterator[Scaled]:
    """A run that trains until it is stopped."""
    start = Scaled.of(run, "scaled", 1_000_000, *SETS, *sets)
    assert isinstance(start, Scaled)
    try:
        yield start
    finally:
        start.process.kill()
        start.process.wait()


def test_scaled_run_trains_every_prompt_once(tmp_path: Path) -> None:
    with scaled(tmp_path / "run", "rollout.replicas={min: 1, max: 2}", "cluster.num_cpus=3") as run:
        run.wait_for(lambda: run.count_lines("replica 1 serves") == 1)
        run.trains_on(2)
        assert run.scale(1) == "1 replica(s) are requested, and 2 serve\n"
        run.wait_for(lambda: run.count_lines("replica 1 has left") == 1, 60)
        run.trains_on(1)
        assert run.scale(2) == "2 replica(s) are requested, and 1 serve\n"
        run.wait_for(lambda: run.count_lines("replica 1 serves") == 2)
        run.trains_on(2)
        run.stopped()
        assert not [row for row in run.rows() if row.get("event") in ("restart", "error", "alarm")], "no actor has failed"
        run.assert_trained_once()


def test_replicas_follow_joining_draining_and_lost_hosts(tmp_path: Path) -> None:
    """Hosts are raylets of this machine: one for the trainer, and others with an engine or two each."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.cluster_utils import Cluster
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    first = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    try:
        sets = ("rollout.replicas={min: 1, max: 3}", f"cluster.address={cluster.address}")
        with scaled(tmp_path / "run", *sets) as run:
            run.trains_on(1)
            large = cluster.add_node(num_cpus=2)
            run.wait_for(lambda: run.count_lines("replica 1 serves") == run.count_lines("replica 2 serves") == 1)
            run.trains_on(3)
            reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
            accepted, why = GcsClient(address=cluster.address).drain_node(large.node_id, reason, "test", 0)
            assert accepted, why
            run.wait_for(lambda: run.count_lines("replica 1 has left") == run.count_lines("replica 2 has left") == 1, 60)
            cluster.remove_node(large)
            run.trains_on(1)
            assert not [row for row in run.rows() if row.get("event") == "restart"], "who was drained has not failed"
            cluster.add_node(num_cpus=1)
            run.wait_for(lambda: run.count_lines("replica 1 serves") == 2)
            first.kill_raylet()
            run.wait_for(lambda: run.count_lines("replica 0 has left") == 1, 120)
            run.trains_on(1)
            run.stopped()
            run.assert_trained_once()
    finally:
        cluster.shutdown()


def test_trainer_without_a_host_gets_the_bundle_of_a_replica_above_the_minimum(tmp_path: Path) -> None:
    """Four hosts of one CPU each, and no other joins: without that the run would wait for one for ever."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    others = [cluster.add_node(num_cpus=1) for _ in range(3)]
    cluster.wait_for_nodes()
    try:
        elastic = ("rollout.replicas={min: 1, max: 3}", f"cluster.address={cluster.address}")
        with scaled(tmp_path / "run", *elastic, "train.parallel.dp=2", "train.checkpoint_every=2") as run:
            run.trains_on(2)
            line = next(row["message"] for row in run.rows() if row.get("message", "").startswith("placement: "))
            (host,) = [place.partition(":")[0] for place in line.removeprefix("placement: ").split("; ") if "trainer-1" in place]
            (gone,) = [node for node in others if node.node_id.startswith(host.partition("/")[2])]
            gone.kill_raylet()
            run.wait_for(lambda: run.count_lines("replica 1 leaves: no other host has capacity for trainer-1") == 1, 120)
            run.wait_for(lambda: run.count_lines("trainer back after") == 1, 120)
            run.trains_on(1)
            run.stopped()
        trained = [row["prompt_id"] for row in read_samples(run.run_dir) if row["kind"] == "update"]
        assert set(Counter(trained).values()) == {SIZE}
    finally:
        cluster.shutdown()
