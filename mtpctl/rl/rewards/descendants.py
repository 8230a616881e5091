"""What a process started, and what that started in turn: found, and ended with it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_END_S = 5.0


def started_by(pid: int) -> list[int]:
    """Ids of all descendants of a process that are alive, whichever of its threads started them."""
    children: list[int] = []
    with contextlib.suppress(OSError):  # it has ended, or a thread of it has
        for thread in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (thread / "children").read_text().split())
    return [each for child in children for each in (child, *started_by(child))]


def become_subreaper() -> None:
    """Have descendants of this process stay its own where their parents end, also those in sessions of their own."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def exit_with_descendants() -> None:
    """End this process, and all its descendants before it: a program that nobody ends would keep its port and its memory."""
    end = time.monotonic() + _END_S
    while (started := started_by(os.getpid())) and time.monotonic() < end:
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)
    os._exit(0)
