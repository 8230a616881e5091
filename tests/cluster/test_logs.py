"""What an actor prints, and what the processes that it starts print, is in its file of the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtpctl.cluster import process
from mtpctl.cluster.process import empty_if_large, folder_for_all, name_for_one, write_to_run

PROGRAM = """
import os, subprocess, sys
from mtpctl.cluster.process import write_to_run
print("before")
print(write_to_run())
print("from python", file=sys.stderr)
os.write(1, b"from native code\\n")
subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
"""


def run(folder: Path, name: str = "rollout replica 0") -> str:
    environment = {**os.environ, **folder_for_all(folder), **name_for_one(name)}
    return subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True).stdout


def test_everything_that_a_process_and_its_children_print_is_in_its_file(tmp_path: Path) -> None:
    assert run(tmp_path) == "before\n"
    head, *lines = (tmp_path / "rollout-replica-0.log").read_text().splitlines()
    assert head.startswith("── 20") and ", process " in head
    assert sorted(lines) == sorted([str(tmp_path / "rollout-replica-0.log"), "from python", "from native code", "from a child"])


def test_a_replica_that_takes_anothers_place_appends(tmp_path: Path) -> None:
    run(tmp_path)
    run(tmp_path)
    assert (tmp_path / "rollout-replica-0.log").read_text().count("from a child") == 2


def test_a_host_that_lacks_the_folder_leaves_the_output_where_it_is(tmp_path: Path) -> None:
    assert run(tmp_path / "nowhere").splitlines()[:2] == ["before", "None"]


def test_a_process_that_no_run_has_started_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(process.FOLDER_VARIABLE, raising=False)
    assert write_to_run() is None


def test_a_file_that_has_grown_is_emptied_and_writers_go_on_at_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "FILE_BYTES", 100)
    path = tmp_path / "a.log"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, b"x" * 100)
    empty_if_large(path, file)
    assert path.stat().st_size == 100
    os.write(file, b"y")
    empty_if_large(path, file)
    os.write(file, b"new")
    os.close(file)
    assert path.read_text() == "new" and (tmp_path / "a.1.log").read_text() == "x" * 100 + "y"


def test_an_actor_of_a_run_writes_to_the_runs_folder(tmp_path: Path) -> None:
    """Through Ray: the folder is told to all actors, the name to each."""
    program = f"""
import ray
from pathlib import Path
from mtpctl.cluster.local import cluster
from mtpctl.cluster.process import name_for_one, write_to_run
from mtpctl.recipe.cluster import ClusterConfig

class Actor:
    def __init__(self):
        write_to_run()
    def say(self):
        print("said")

with cluster(ClusterConfig(num_cpus=1), cpus=1, gpus=0, tidy=False, logs=Path({str(tmp_path)!r})):
    actor = ray.remote(Actor).options(runtime_env={{"env_vars": name_for_one("trainer rank 3")}}).remote()
    ray.get(actor.say.remote())
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200)
    assert (tmp_path / "trainer-rank-3.log").read_text().splitlines()[1:] == ["said"]
