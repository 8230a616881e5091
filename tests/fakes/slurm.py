"""Slurm for tests: fakes of its commands, and a cluster of three nodes on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.fakes.processes import command_line

DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = ("n1", "n2", "n3")
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/cgroup
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmdTimeout=10
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=2,bf_interval=5
PartitionName=main Nodes=n[1-3] Default=YES MaxTime=60 State=UP
PartitionName=urgent Nodes=n[1-3] MaxTime=60 PriorityTier=10 State=UP
"""


def missing() -> str | None:
    """Why Slurm cannot run here; None if it can."""
    if lacking := [name for name in (*DAEMONS, "sbatch") if shutil.which(name, path=_PATH) is None]:
        return f"Slurm is not installed: no {', '.join(lacking)}"
    return None if os.geteuid() == 0 else "slurmd needs root"


_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"


class SlurmCluster:
    """The daemons of a cluster in `folder`; `environment` makes Slurm's commands use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _PATH}
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        folder, ports = self.folder, [_free_port() for _ in range(1 + len(NODES))]
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        nodes = [
            f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs=4 State=UNKNOWN\n"
            for node, port in zip(NODES, ports[1:], strict=True)
        ]
        (folder / "slurm.conf").write_text(CONFIG.format(host=socket.gethostname(), ports=ports, folder=folder) + "".join(nodes))
        (folder / "cgroup.conf").write_text("CgroupAutomount=yes\n")
        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed", "key-file": "key"}
        options = [f"--{option}={folder}/munge.{name}" for option, name in files.items()]
        self._daemon("munged", "munged", "--foreground", "--force", *options)
        until(lambda: (folder / "munge.socket").exists(), 30)
        self._daemon("slurmctld", "slurmctld", "-D", "-c")
        for node in NODES:
            self.start_node(node)
        until(lambda: self.call("sinfo", "--noheader", "--format=%t %D").split() == ["idle", "3"], 60)

    def start_node(self, node: str) -> None:
        self._daemon(node, "slurmd", "-D", "-N", node)

    def _daemon(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            path = shutil.which(command[0], path=_PATH)
            assert path is not None
            self.daemons[name] = subprocess.Popen(
                [path, *command[1:]], env=self.environment, stdout=out, stderr=out, start_new_session=True
            )

    def call(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def state(self, job: str) -> str:
        """The state of a job; empty if it has left the queue."""
        done = subprocess.run(
            ["squeue", "--noheader", f"--jobs={job}", "--format=%T"],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout.strip()

    def kill_node(self, node: str, job: str) -> None:
        """End a node at once, with all processes of a job there, as a power failure does."""
        self.daemons[node].kill()
        self.daemons.pop(node).wait(timeout=30)
        wanted = {"SLURM_JOB_ID": job, "SLURMD_NODENAME": node}
        tasks = [each for each in psutil.process_iter() if wanted.items() <= _environment(each).items()]
        stepds = [parent for each in tasks if (parent := each.parent()) is not None and "slurmstepd" in parent.name()]
        for each in [*stepds, *tasks]:
            with suppress(psutil.NoSuchProcess):
                each.kill()

    def processes(self, job: str) -> list[str]:
        """The command lines of a job's processes on this machine."""
        of_job = [each for each in psutil.process_iter() if _environment(each).get("SLURM_JOB_ID") == job]
        return [line[:200] for line in map(command_line, of_job) if line]

    def close(self) -> None:
        for job in self.call("squeue", "--noheader", "--format=%i").split():
            with suppress(AssertionError):
                self.call("scancel", "--signal=KILL", job)
        with suppress(TimeoutError):
            until(lambda: not self.call("squeue", "--noheader").strip(), 40)
        for daemon in reversed(self.daemons.values()):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self.daemons.values():
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def until(condition: Callable[[], object], seconds: float) -> None:
    """Wait until a condition holds. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.5)


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


def stand_in(folder: Path, **commands: str) -> None:
    """Write shell scripts in place of Slurm's commands."""
    folder.mkdir(exist_ok=True)
    for name, body in commands.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
