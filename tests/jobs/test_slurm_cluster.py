"""Jobs on a real Slurm of three nodes on this machine: stopped, preempted, cancelled, with a lost node, and an array of seeds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.slurm import SlurmCluster, missing, slurm_cluster, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.skipif(missing() is not None, reason=str(missing()))]

OVERLAY = """
model: {config: {hidden_size: 64, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1, intermediate_size: 64}}
data: {task: {train_size: 8000, eval_size: 8, min_digits: 3}}
train:
  stages: [rl]
  eval_every: 100000
  tokens_per_microbatch: 1024
  rl: {prompts_per_step: 4, group_size: 2, dynamic_sampling: false}
rollout: {max_tokens: 16, max_in_flight: 8}
telemetry: {tensorboard: false, samples: 64}
"""
START_S = 240
"""Timeout for the first update of a job, in seconds: two cores start up to three Ray nodes."""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


class Job:
    """A submitted run of the tiny recipe."""

    def __init__(self, slurm: SlurmCluster, run: Path, *options: str) -> None:
        self.slurm, self.run = slurm, run
        overlay = run.parent / "small.yaml"
        overlay.write_text(OVERLAY)
        self.mtpctl("launch", "slurm", "tiny_mtp", "--overlay", str(overlay), "--set", f"run_dir={run.parent}/{{name}}", *options)
        self.id = (run / "logs" / "slurm.id").read_text().strip()

    def mtpctl(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "mtpctl", *arguments]
        done = subprocess.run(command, env=self.slurm.environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def rows(self) -> list[dict[str, Any]]:
        path = self.run / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def step(self) -> int:
        return max((row["step"] for row in self.rows if row.get("phase") == "rl"), default=0)

    def events(self, kind: str) -> list[str]:
        return [row["message"] for row in self.rows if row.get("event") == kind]

    def until_step(self, step: int) -> None:
        self._until(lambda: self.step >= step, START_S)

    def until_ended(self) -> None:
        self._until(lambda: not self.slurm.state(self.id), START_S)

    def _until(self, condition: Any, seconds: float) -> None:
        try:
            until(condition, seconds)
        except TimeoutError:
            logs = "\n".join(path.read_text(errors="replace")[-1500:] for path in sorted(self.run.glob("logs/*slurm*.log")))
            pytest.fail(f"job {self.id} is {self.slurm.state(self.id) or 'gone'} at step {self.step}:\n{logs}")


def trained_prompts(run: Path) -> Counter[str]:
    """How many updates each prompt was trained in."""
    rows = [json.loads(line) for file in (run / "samples").glob("*.jsonl") for line in file.read_text().splitlines()]
    return Counter(prompt for _, prompt in {(row["step"], row["prompt"]) for row in rows})


def left_behind(slurm: SlurmCluster, job: Job) -> list[str]:
    folders = [path for pattern in ("", "-*") for path in Path("/tmp").glob(f"ray-{job.id}{pattern}")]
    return [*slurm.processes(job.id), *map(str, folders), *map(str, Path("/dev/shm").glob(f"*{job.run.name}*"))]


def test_stop_before_the_time_limit_is_resumed_and_every_prompt_is_trained_once(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path / "limit", "--set", "name=limit", "--requeue", "--set", "train.rl.steps=60")
    job.until_step(5)
    slurm.call("scancel", "--signal=USR1", "--batch", job.id)  # what --signal of the script sends
    job.until_ended()
    assert job.step == 60 and len(job.events("resume")) == 1
    (stop,) = [message for message in job.events("stop") if "checkpoint" in message]
    assert stop.startswith("stopped in rl at step")
    # The held-out problems are measured before and after, all others are trained once.
    prompts = trained_prompts(job.run)
    assert sum(count == 1 for count in prompts.values()) >= 4 * 60 and sum(count > 1 for count in prompts.values()) <= 8
    assert "done, rl step 60 of 60" in job.mtpctl("status", str(job.run))
    assert not left_behind(slurm, job)


def test_preempted_job_resumes_after_the_other(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path / "preempted", "--set", "name=preempted", "--requeue", "--set", "train.rl.steps=60")
    job.until_step(5)
    whole = ["--partition=urgent", "--nodes=3", "--exclusive"]
    other = slurm.call("sbatch", "--parsable", *whole, "--output=/dev/null", "--wrap=sleep 5").strip()
    until(lambda: slurm.state(other) == "RUNNING", 120)
    assert "PENDING" in job.mtpctl("status", str(job.run))
    job.until_ended()
    assert job.step == 60 and len(job.events("resume")) == 1


def test_cancelled_job_on_three_nodes_writes_a_checkpoint_and_leaves_nothing(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path / "cancelled", "--set", "name=cancelled", "--nodes", "3", "--requeue", "--set", "train.rl.steps=100000")
    job.until_step(3)
    assert "RUNNING" in job.mtpctl("status", str(job.run))
    # One Ray node on each: the head is in the script, and each other node has its own log.
    assert [path.read_text().count("Ray runtime started") for path in job.run.glob(f"logs/ray-{job.id}-0-*-*.log")] == [1, 1]
    slurm.call("scancel", job.id)
    job.until_ended()
    assert "stopped in rl at step" in job.events("stop")[-1] and list((job.run / "checkpoints").glob("rl-*"))
    assert not left_behind(slurm, job)


def test_job_that_loses_a_node_resumes_on_another(slurm: SlurmCluster, tmp_path: Path) -> None:
    minutes = "train.checkpoint_every=5"
    job = Job(slurm, tmp_path / "lost", "--set", "name=lost", "--nodes", "2", "--requeue", "--set", minutes, "--set", "train.rl.steps=400")
    job.until_step(12)
    hosts = slurm.call("squeue", "--noheader", f"--jobs={job.id}", "--format=%N")
    assert "n[1-2]" in hosts
    try:
        slurm.kill_node("n2", job.id)
        until(lambda: slurm.state(job.id) != "RUNNING", 90)
        job._until(lambda: len(job.events("resume")) == 1, START_S)
        assert "n[1,3]" in slurm.call("squeue", "--noheader", f"--jobs={job.id}", "--format=%N")
        slurm.call("scancel", job.id)
        job.until_ended()
    finally:
        slurm.start_node("n2")
    until(lambda: "down" not in slurm.call("sinfo", "--noheader", "--format=%t"), 60)


def test_elastic_run_continues_on_the_remaining_nodes(slurm: SlurmCluster, tmp_path: Path) -> None:
    # Two CPUs on each node: the trainer and a replica on the first, and two replicas on each other node.
    elastic = ["--cpus", "2", "--sbatch=--no-kill", "--set", "rollout.replicas={min: 1, max: 5}"]
    job = Job(slurm, tmp_path / "elastic", "--set", "name=elastic", "--nodes", "3", *elastic, "--set", "train.rl.steps=100000")
    job._until(lambda: any(row.get("rollout/replicas", 0) >= 5 for row in job.rows), START_S)
    try:
        slurm.kill_node("n3", job.id)
        job._until(lambda: any("its host is lost" in message for message in job.events("rollout")), 120)
        job.until_step(job.step + 30)
        assert slurm.state(job.id) == "RUNNING" and not job.events("resume")
        slurm.call("scancel", job.id)
        job.until_ended()
    finally:
        slurm.start_node("n3")
    until(lambda: "down" not in slurm.call("sinfo", "--noheader", "--format=%t"), 60)


def test_array_trains_each_seed_in_its_own_run(slurm: SlurmCluster, tmp_path: Path) -> None:
    first = Job(slurm, tmp_path / "arr-seed1", "--set", "name=arr", "--seeds", "1,2", "--set", "train.rl.steps=3")
    until(lambda: not slurm.state(first.id.partition("_")[0]), START_S)
    runs = json.loads(first.mtpctl("runs", str(tmp_path), "--json"))
    assert {(Path(run["path"]).name, run["state"], run["step"]) for run in runs} == {("arr-seed1", "done", 3), ("arr-seed2", "done", 3)}
    recipes = [(tmp_path / f"arr-seed{seed}" / "recipe.resolved.yaml").read_text() for seed in (1, 2)]
    assert [f"\nseed: {seed}\n" in recipe for seed, recipe in zip((1, 2), recipes, strict=True)] == [True, True]
