"""A command with a local Ray cluster, in a separate process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import psutil
import pytest

from tests.environment import with_tree

COMMAND = """
import os, signal, sys
import ray
from mtpctl.cluster.local import cluster
from mtpctl.recipe.schema import ClusterConfig

class Actor:
    def start(self):
        import subprocess
        self.child = subprocess.Popen(["sleep", "600"])
        return os.getpid()
    def store(self):
        from mtpctl.cluster.rendezvous import address_of, host_store, use_own_interface
        self.store = host_store()
        use_own_interface()
        return address_of(self.store), os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]

taken = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, frame: taken.append(number))
before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
with cluster(ClusterConfig(num_cpus=1), cpus=1, gpus=0) as daemons:
    assert {number: signal.getsignal(number) for number in before} == before
    actor = ray.remote(Actor).options(num_cpus=0).remote()
    print(ray.get(actor.start.remote()), flush=True)
    for line in sys.stdin:
        if line == "ask\\n":  # Python has handled the signals that came before
            print(len(taken), ray.get(actor.start.remote()), daemons.describe_ended(), flush=True)
        elif line == "store\\n":
            print(*ray.get(actor.store.remote()), flush=True)
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
        self.started = psutil.Process(self.process.pid).children(recursive=True)

    def ask(self, question: Literal["ask", "store"] = "ask") -> str:
        """`ask`: the signals taken, the actor's process and a lost daemon. `store`: the address of a new store, and the interfaces."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{question}\n")
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


@contextmanager
def started() -> Iterator[Command]:
    """A command that has started. It is killed at the end."""
    # pytest's own folders are too deep for Ray's sockets
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        command = Command(Path(folder))
        try:
            yield command
        finally:
            command.close()


@pytest.fixture
def command() -> Iterator[Command]:
    with started() as command:
        yield command
