"""Observes worker processes from outside: CPU usage and stack of a call, and whether it takes much longer than recent calls."""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import psutil

from mtpctl.user_code import innermost

_MIN_S, _MEDIAN_FACTOR = 0.05, 10  # a call is long if it exceeds both `_MIN_S` and the median times this factor
_MIN_FIRST_S, _MIN_VERY_FIRST_S = 1.0, 2.0  # instead of `_MIN_S`, for the first call of a process, and of the pool: it may load modules
_MIN_CPU_S, _PERCENTILE_FACTOR = 0.01, 3  # factor for the percentile; see `max_cpu_seconds`
_WARM_UP_CALLS, _WARM_UP_CPU_S = 5, 0.25  # the first calls of each process are compared with first calls only; their largest CPU bound
_HISTORY, _WARM_UP_HISTORY = 64, 16
_PERCENTILE = 0.95
_MIN_FREE_MEMORY = 0.1  # share of memory that must be free to start an additional process
_FRAME = re.compile(r'File "(.*)", line (\d+) in ')  # output of faulthandler, innermost frame first
_CALLER = 'mtpctl/rl/rewards/function.py"'


class RecentDurations:
    """Durations of recent calls, and the bounds beyond which a call is long. `completed`: earlier calls of the same process."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_HISTORY)
        self._cpu: deque[float] = deque(maxlen=_HISTORY)
        self._warm_up_cpu: deque[float] = deque(maxlen=_WARM_UP_HISTORY)

    def add(self, seconds: float, cpu: float, completed: int) -> None:
        """Record a finished call: wall-clock and CPU seconds."""
        self._seconds.append(seconds)
        (self._cpu if completed >= _WARM_UP_CALLS else self._warm_up_cpu).append(cpu)

    def max_seconds(self, completed: int) -> float:
        """Wall-clock seconds beyond which a call is long."""
        minimum = _MIN_S if completed else _MIN_FIRST_S if self._seconds else _MIN_VERY_FIRST_S
        return max(minimum, _MEDIAN_FACTOR * statistics.median(self._seconds or [0.0]))

    def max_cpu_seconds(self, completed: int) -> float:
        """CPU seconds beyond which a call is long. Wall-clock time alone is not sufficient, because on a busy machine every call is slow.

        The median also limits the bound, because a few calls that hung would raise the percentile.
        """
        if completed >= _WARM_UP_CALLS and self._cpu:
            percentile = sorted(self._cpu)[int(_PERCENTILE * (len(self._cpu) - 1))]
            return max(_MIN_CPU_S, min(_PERCENTILE_FACTOR * percentile, _MEDIAN_FACTOR * statistics.median(self._cpu)))
        if len(self._warm_up_cpu) < _WARM_UP_CALLS:
            return _WARM_UP_CPU_S
        return min(_WARM_UP_CPU_S, max(_MIN_CPU_S, _PERCENTILE_FACTOR * max(self._warm_up_cpu)))


def trace_location(pid: int, trace: int) -> str:
    """The line of the user's code that a worker executes, such as `judge.py:12`. Empty until the worker has written its stack.

    Supports plain functions only. `trace`: file descriptor, in the worker's process, of the file for its stack.
    """
    try:
        text = Path(f"/proc/{pid}/fd/{trace}").read_text(errors="replace")
    except OSError:  # the process has ended
        return ""
    frames = [(file, int(line)) for file, line in _FRAME.findall(text.partition(_CALLER)[0])]
    # `function.py` calls the user's function, so the outermost of these frames is in the function's file.
    return innermost(frames[::-1], frames[-1][0] if frames else None) if _CALLER in text else ""


def use_idle_priority(pids: Iterable[int]) -> None:
    """Run these processes only while a CPU is idle (Linux's SCHED_IDLE)."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))


def restore_priority(pid: int) -> bool:
    """Undo `use_idle_priority` for one process. Returns False if this requires root, so the process must be replaced."""
    try:
        os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))
    except PermissionError:
        return False
    except ProcessLookupError:  # the controller notices its end on the socket
        return True
    return True


def cpu_seconds(pids: Iterable[int]) -> float:
    """Total CPU seconds of these processes, without their children."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended
            total += time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3) of glibc
    return total


def is_running(pid: int) -> bool:
    """Whether a process is running, or ready to run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "R"
    except OSError:  # the process has ended
        return False


def has_free_memory() -> bool:
    """Whether enough memory is free to start another process."""
    memory = psutil.virtual_memory()
    return bool(memory.available > _MIN_FREE_MEMORY * memory.total)
