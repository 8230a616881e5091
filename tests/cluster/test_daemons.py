"""Ray's daemons ignore signals to the command's group, end with the command, and listen only on the loopback interface."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import psutil

from tests.fakes.daemons import Command, command
from tests.fakes.processes import runs

__all__ = ["command"]
DEADLINE_S = 120.0


def poll(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_daemons_ignore_signals_to_the_group_and_end_with_a_killed_command(command: Command) -> None:
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


def test_a_lost_gcs_server_is_reported(command: Command) -> None:
    next(process for process in command.started if process.name() == "gcs_server").kill()
    poll(lambda: command.ask().endswith("gcs_server has ended with signal 9"))
