"""The watchdog ends the daemons and nothing else when the command ends or is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mtpctl.cluster import leftovers
from mtpctl.cluster.watchdog import Watchdog, members
from tests.environment import with_tree
from tests.fakes.processes import runs

DEADLINE_S = 60.0

COMMAND = """
import os, subprocess, sys, time
from pathlib import Path
from mtpctl.cluster import leftovers
from mtpctl.cluster.watchdog import Watchdog

watchdog = Watchdog()
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
child = "import subprocess, sys; subprocess.Popen(sys.argv[1:]{}); subprocess.run(sys.argv[1:])"
daemon = subprocess.Popen([sys.executable, "-c", child.format(""), *sleep], preexec_fn=watchdog.register, start_new_session=True)
apart = [sys.executable, "-c", child.format(", start_new_session=True"), *sleep]
other = subprocess.Popen(apart, preexec_fn=watchdog.register, start_new_session=True)
bystander = subprocess.Popen(sleep, start_new_session=True)
forked = os.fork()  # holds the pipe
if not forked:
    time.sleep(600)
leftovers.make_marked(Path(os.environ["VERSIONS"]))  # a folder named on a command line counts as in use
print(watchdog._process.pid, daemon.pid, other.pid, bystander.pid, forked, flush=True)
end = input()
if end == "close":
    watchdog.close()
    print("closed", flush=True)
    input()
"""


def poll(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def versions() -> Path:
    return leftovers.SHARED_MEMORY / f"{leftovers.PREFIX}watchdog-{os.getpid()}-{time.monotonic_ns()}"


@pytest.mark.parametrize("end", ["close", "kill"])
def test_the_watchdog_ends_only_daemons_and_their_descendants(versions: Path, end: str) -> None:
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=with_tree(VERSIONS=str(versions)),
    )
    assert command.stdin is not None and command.stdout is not None
    watchdog, daemon, other, bystander, forked = (psutil.Process(int(pid)) for pid in command.stdout.readline().split())
    try:
        poll(lambda: len(daemon.children()) == len(other.children()) == 2)
        ours = [each for leader in (daemon, other) for each in (leader, *leader.children(recursive=True))]
        if end == "close":
            command.stdin.write("close\n")
            command.stdin.flush()
            assert command.stdout.readline() == "closed\n"
        else:
            command.send_signal(signal.SIGKILL)
        # The command is not waited for: a parent may leave it a zombie.
        poll(lambda: not any(map(runs, (*ours, watchdog))))
        assert runs(bystander) and runs(forked)
        assert versions.exists() == (end == "close")
    finally:
        command.kill()
        bystander.kill()
        forked.kill()
        command.wait()
        leftovers.remove(wait=True)


def test_a_session_with_another_leader_has_no_members() -> None:
    """The id of a process that has ended may have been given to another one."""
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        try:
            started = leftovers.started(process.pid)
            poll(lambda: os.getsid(process.pid) == process.pid)
            assert [each.pid for each in members({process.pid: started})] == [process.pid]
            assert members({process.pid: started - 1}) == []
        finally:
            process.kill()


def test_the_command_ends_despite_a_killed_watchdog() -> None:
    watchdog = Watchdog()
    watchdog._process.kill()
    watchdog._process.wait()
    watchdog.close()
    watchdog.close()
