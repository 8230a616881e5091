"""Ends the daemons of a local Ray cluster when the command that started them ends for any reason.

Each of Ray's daemons has its own session, so that signals to the command's process group do not reach it. The watchdog is a small process
with its own session. Daemons write their process id and start time into a pipe that it reads. When the command closes the watchdog, or ends
without doing so, the watchdog kills all processes of the daemons' sessions and their descendants. If the command was killed, it also
removes the command's leftovers in shared memory.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mtpctl.cluster import leftovers

END_S = 15.0
"""Seconds to wait for killed processes to disappear."""
_CLOSED = b"closed"
_POLL_S = 0.5
_PAUSE_S = 0.02


class Watchdog:
    """The command's end of the pipe, and the process that reads it."""

    def __init__(self) -> None:
        reading, self._pipe = os.pipe()
        try:
            self._process = subprocess.Popen(
                # -P: do not import modules from the working directory.
                [sys.executable, "-P", "-m", __name__, str(os.getpid()), str(leftovers.started(os.getpid()))],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(reading)
        self._closed = False

    def register(self) -> None:
        """Register the calling process, the leader of its session. A daemon calls it before its program begins."""
        os.write(self._pipe, b"%d %d\n" % (os.getpid(), leftovers.started(os.getpid())))

    def close(self) -> None:
        """End all processes of the daemons' sessions, and wait for the watchdog."""
        if self._closed:
            return
        self._closed = True
        with suppress(BrokenPipeError):  # the watchdog was killed
            os.write(self._pipe, _CLOSED + b"\n")
        os.close(self._pipe)
        try:
            self._process.wait(2 * END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True, slots=True)
class Process:
    """A process according to `/proc`. `started` is in clock ticks since boot."""

    pid: int
    parent: int
    session: int
    started: int


def running() -> dict[int, Process]:
    """The processes of this machine that have not ended, by their ids."""
    processes = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # ended meanwhile
            # The second field is the program's name in parentheses, which may contain blanks and parentheses.
            state, parent, _, session, *fields = path.read_text().rpartition(")")[2].split()
            if state not in leftovers.ENDED:
                processes[int(path.parent.name)] = Process(int(path.parent.name), int(parent), int(session), int(fields[15]))
    return processes


def members(sessions: dict[int, int]) -> list[Process]:
    """The processes of these sessions and their descendants. `sessions`: start time of each session's leader, by process id.

    The id of a session is not reused while it has a member. If its leader has another start time, it is another session.
    """
    processes = running()
    ours = {leader for leader, started in sessions.items() if leader not in processes or processes[leader].started == started}
    pids = {process.pid for process in processes.values() if process.session in ours}
    while children := {process.pid for process in processes.values() if process.parent in pids} - pids:
        pids |= children
    return [processes[pid] for pid in pids]


def end(sessions: dict[int, int]) -> None:
    """Kill the members of the sessions until none is left, for at most `END_S`."""
    deadline = time.monotonic() + END_S
    while (left := members(sessions)) and time.monotonic() < deadline:
        for process in left:
            with suppress(ProcessLookupError, PermissionError):
                if leftovers.started(process.pid) == process.started:
                    os.kill(process.pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)


def watch(command: int, started: int) -> None:
    """Read the pipe on stdin until the command (given by process id and start time) closes it or ends. Then end the daemons."""
    text = b""
    while True:
        if select.select([0], [], [], _POLL_S)[0]:
            part = os.read(0, 1 << 16)
            text += part
            if not part or text.endswith(_CLOSED + b"\n"):
                break
        elif _ended(command, started):
            break
    *lines, _ = text.split(b"\n")
    closed = _CLOSED in lines
    end({int(pid): int(ticks) for pid, ticks in (line.split() for line in lines if line != _CLOSED)})
    if closed:
        return
    deadline = time.monotonic() + END_S
    while not _ended(command, started) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    leftovers.remove(wait=True)


def _ended(pid: int, started: int) -> bool:
    try:
        return leftovers.started(pid) != started
    except ProcessLookupError:
        return True


if __name__ == "__main__":
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    watch(int(sys.argv[1]), int(sys.argv[2]))
