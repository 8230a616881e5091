"""Output of an actor and its child processes is in the actor's log file, and imported modules are not garbage-collected."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtpctl.cluster import process
from mtpctl.cluster.process import make_log_folder_variables, make_log_name_variables, redirect_output, rotate_if_large

PROGRAM = """
import os, subprocess, sys
from mtpctl.cluster.process import redirect_output
print("before")
print(redirect_output())
print("from python", file=sys.stderr)
os.write(1, b"from native code\\n")
subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
"""


def run(folder: Path, name: str = "rollout replica 0") -> str:
    environment = {**os.environ, **make_log_folder_variables(folder), **make_log_name_variables(name)}
    return subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True).stdout


def test_output_of_a_process_and_its_children_is_in_its_file(tmp_path: Path) -> None:
    assert run(tmp_path) == "before\n"
    head, *lines = (tmp_path / "rollout-replica-0.log").read_text().splitlines()
    assert head.startswith("── 20") and ", process " in head
    assert sorted(lines) == sorted([str(tmp_path / "rollout-replica-0.log"), "from python", "from native code", "from a child"])


def test_a_replacement_replica_appends_to_the_file(tmp_path: Path) -> None:
    run(tmp_path)
    run(tmp_path)
    assert (tmp_path / "rollout-replica-0.log").read_text().count("from a child") == 2


def test_output_is_not_redirected_without_the_folder(tmp_path: Path) -> None:
    assert run(tmp_path / "nowhere").splitlines()[:2] == ["before", "None"]


def test_output_is_not_redirected_outside_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(process.FOLDER_VARIABLE, raising=False)
    assert redirect_output() is None


def test_a_large_file_is_copied_and_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "FILE_BYTES", 100)
    path = tmp_path / "a.log"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, b"x" * 100)
    rotate_if_large(path, file)
    assert path.stat().st_size == 100
    os.write(file, b"y")
    rotate_if_large(path, file)
    os.write(file, b"new")
    os.close(file)
    assert path.read_text() == "new" and (tmp_path / "a.1.log").read_text() == "x" * 100 + "y"


def test_an_actor_writes_to_the_log_folder_of_its_run(tmp_path: Path) -> None:
    """Ray passes the folder to all actors, and each actor's name to it."""
    program = f"""
import ray
from pathlib import Path
from mtpctl.cluster.local import cluster
from mtpctl.cluster.process import make_log_name_variables, redirect_output
from mtpctl.recipe.schema import ClusterConfig

class Actor:
    def __init__(self):
        redirect_output()
    def say(self):
        print("said")

with cluster(ClusterConfig(num_cpus=1), cpus=1, gpus=0, remove_leftovers=False, logs=Path({str(tmp_path)!r})):
    actor = ray.remote(Actor).options(runtime_env={{"env_vars": make_log_name_variables("trainer rank 3")}}).remote()
    ray.get(actor.say.remote())
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200)
    assert (tmp_path / "trainer-rank-3.log").read_text().splitlines()[1:] == ["said"]


SETTLE = """
import gc, weakref
import mtpctl.recipe.schema
from mtpctl.cluster.process import freeze_heap

class Node: pass

def circle():
    node = Node()
    node.self = node
    return weakref.ref(node)

gc.disable()
loaded = [Node() for _ in range(1000)]
before, alive = circle(), len(gc.get_objects())
freeze_heap()
assert before() is None, "garbage is collected first"
tracked = gc.get_objects()
assert alive > 10_000 > len(tracked) and not any(isinstance(each, Node) for each in tracked), "loaded objects are not visited"
after = circle()
assert after() is not None
gc.collect()
assert after() is None, "later garbage is collected"
"""


def test_objects_are_collected_only_if_created_after_settle_heap() -> None:
    subprocess.run([sys.executable, "-c", SETTLE], check=True, timeout=60)


IMPORT = """
import gc
from mtpctl.cluster.process import gc_paused_for_imports

class Node: pass

with gc_paused_for_imports():
    assert not gc.isenabled()
    loaded = Node()
assert gc.isenabled() and not any(isinstance(each, Node) for each in gc.get_objects()), "imported objects are not visited"
gc.disable()
try:
    with gc_paused_for_imports():
        raise ImportError
except ImportError:
    assert not gc.isenabled(), "a disabled collector stays disabled"
"""


def test_the_collector_is_disabled_while_importing_and_skips_the_modules() -> None:
    subprocess.run([sys.executable, "-c", IMPORT], check=True, timeout=60)
