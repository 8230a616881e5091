"""A cluster for one run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

SCRIPT = """
import signal, time
from mtpctl.cluster import cluster
from mtpctl.recipe.schema import ClusterConfig

signal.signal(signal.SIGTERM, signal.default_int_handler)
try:
    with cluster(ClusterConfig(device="cpu", num_cpus=1), cpus=1, gpus=0):
        print("up", flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.timeout(120)
def test_sigterm_ends_a_run_as_it_would_without_ray() -> None:
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "interrupted\n"
        assert process.wait(60) == 0
        assert not _others(process.pid), "what Ray started has ended with it"
    finally:
        process.kill()


def _others(session: int) -> list[int]:
    """Processes of a session that still run a moment later."""
    end = time.monotonic() + 10
    while (found := [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _session(pid) == session]) and (
        time.monotonic() < end
    ):
        time.sleep(0.2)
    return found


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None
