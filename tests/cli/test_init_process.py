"""The command as the first process of a container: signals reach it, and processes without a parent are waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.environment import with_tree

UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
allowed = pytest.mark.skipif(
    subprocess.run([*UNSHARE, "true"], capture_output=True).returncode != 0, reason="no process namespace may be created here"
)

COMMAND = """
import os, signal, subprocess, sys, time
from mtpctl.cli.app import fork_command

assert os.getpid() == 1
fork_command()
assert os.getpid() != 1 and os.getppid() == 1 and os.getpgid(0) == os.getpid()
{body}
"""
ORPHAN = """
child = subprocess.Popen(["sh", "-c", "sleep 0.05 & echo $!"], stdout=subprocess.PIPE, text=True)
orphan = int(child.communicate()[0])
while os.path.exists(f"/proc/{orphan}"):
    time.sleep(0.01)
print("waited for", flush=True)
sys.exit(7)
"""
SIGNALS = """
taken = []
signal.signal(signal.SIGTERM, lambda number, frame: taken.append(number))
print("ready", flush=True)
while not taken:
    time.sleep(0.01)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
print("again", flush=True)
time.sleep(600)
"""


def start(body: str) -> subprocess.Popen[str]:
    command = [*UNSHARE, sys.executable, "-c", COMMAND.format(body=body)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=with_tree(), start_new_session=True)


@allowed
@pytest.mark.timeout(120)
def test_orphans_are_reaped_and_the_exit_code_is_that_of_the_command() -> None:
    with start(ORPHAN) as process:
        assert process.communicate()[0] == "waited for\n"
    assert process.returncode == 7


@allowed
@pytest.mark.timeout(120)
def test_signals_are_forwarded_once_each_and_may_end_the_command() -> None:
    with start(SIGNALS) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        (first,) = psutil.Process(process.pid).children()
        os.kill(first.pid, signal.SIGTERM)
        assert process.stdout.readline() == "again\n"
        # Process 1 itself would not end: it has no handler.
        os.kill(first.pid, signal.SIGTERM)
    assert process.returncode == 143
