"""Ray's daemons are out of reach of signals to the command's group, end with it, and listen on the loopback interface alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.environment import with_tree
from tests.fakes.processes import runs

DEADLINE_S = 120.0

COMMAND = """
import os, signal, sys
import ray
from mtpctl.cluster.local import cluster
from mtpctl.recipe.cluster import ClusterConfig

class Actor:
    def start(self):
        import subprocess
        self.child = subprocess.Popen(["sleep", "600"])
        return os.getpid()
    def store(self):
        from mtpctl.cluster.rendezvous import address_of, host_store, use_own_interface
        self.held = host_store()
        use_own_interface()
        return address_of(self.held), os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]

taken = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, frame: taken.append(number))
before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
with cluster(ClusterConfig(num_cpus=1), cpus=1, gpus=0) as daemons:
    assert {number: signal.getsignal(number) for number in before} == before
    actor = ray.remote(Actor).options(num_cpus=0).remote()
    print(ray.get(actor.start.remote()), flush=True)
    print(*ray.get(actor.store.remote()), flush=True)
    for line in sys.stdin:
        if line == "ask\\n":  # Python has handled the signals that came before
            print(len(taken), ray.get(actor.start.remote()), daemons.ended(), flush=True)
        else:
            break
print("end", flush=True)
"""


class Command:
    """A command with a local cluster and an actor that has started a process."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.home.mkdir()
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", COMMAND],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env=with_tree(HOME=str(self.home), RAY_TMPDIR=str(folder)),
            )
        self.actor = int(self.read())
        self.store, self.gloo, self.nccl = self.read().split()
        self.started = psutil.Process(self.process.pid).children(recursive=True)

    def ask(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("ask\n")
        self.process.stdin.flush()
        return self.read()

    def read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        return line.strip()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def command() -> Iterator[Command]:
    # pytest's own folders are too deep for Ray's sockets
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        command = Command(Path(folder))
        try:
            yield command
        finally:
            command.close()


def poll(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_signals_to_the_group_do_not_reach_ray_and_sigkill_of_the_command_ends_all(command: Command) -> None:
    assert {os.getsid(process.pid) for process in command.started}.isdisjoint({os.getsid(command.process.pid)})
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        os.killpg(command.process.pid, number)
    poll(lambda: int(command.ask().split()[0]) == 3)
    assert command.ask() == f"3 {command.actor} None"
    assert all(map(runs, command.started))
    names = [process.name() for process in command.started]
    assert "gcs_server" in names and "raylet" in names and "sleep" in names
    started = psutil.Process(command.process.pid).children(recursive=True)  # with those of later calls
    command.process.kill()
    poll(lambda: not any(map(runs, started)))


def test_nothing_runs_after_the_end_of_the_cluster(command: Command) -> None:
    assert command.process.stdin is not None
    command.process.stdin.close()
    assert command.read() == "end"
    assert not any(map(runs, command.started))


def test_lost_gcs_server_is_noticed(command: Command) -> None:
    next(process for process in command.started if process.name() == "gcs_server").kill()
    poll(lambda: command.ask().endswith("gcs_server has ended with signal 9"))
