"""Watches processes of a reward function from outside: what they are doing, and whether a call takes far longer than the last ones did."""

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

_LONG_S, _TIMES = 0.05, 10  # a call is long beyond this many seconds and this many times the median of the last calls
_FIRST_S, _VERY_FIRST_S = 1.0, 2.0  # the same seconds for the first call of a process, and of all: it may have to load something
_BURNT_S, _TIMES_MOST = 0.01, 3  # the same in CPU seconds, and times what nearly all of the last calls took
_YOUNG, _BURNT_YOUNG_S = 5, 0.25  # the first calls of a process are compared among themselves; the bound before there are enough
_LAST, _LAST_YOUNG = 64, 16
_NEARLY_ALL = 0.95
_FREE_MEMORY = 0.1  # below this share of free memory no process is started beside the others
_FRAME = re.compile(r'File "(.*)", line (\d+) in ')  # of the module faulthandler, the innermost first
_CALLER = 'mtpctl/rl/rewards/function.py"'


class Usual:
    """How long the last calls of a function took, and when a call counts as long. `answered`: earlier calls of its process."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_LAST)
        self._burnt: deque[float] = deque(maxlen=_LAST)
        self._burnt_young: deque[float] = deque(maxlen=_LAST_YOUNG)

    def add(self, seconds: float, burnt: float, answered: int) -> None:
        """Note a call that has ended: its seconds on the clock, and its CPU seconds (`burnt`)."""
        self._seconds.append(seconds)
        (self._burnt if answered >= _YOUNG else self._burnt_young).append(burnt)

    def long_s(self, answered: int) -> float:
        """The seconds on the clock beyond which a call is long."""
        least = _LONG_S if answered else _FIRST_S if self._seconds else _VERY_FIRST_S
        return max(least, _TIMES * statistics.median(self._seconds or [0.0]))

    def burnt_s(self, answered: int) -> float:
        """The CPU seconds beyond which a call is long; on a busy machine any call is long by the clock.

        Where several of the last calls hung, the bound by the median still says what most calls take.
        """
        if answered >= _YOUNG and self._burnt:
            nearly_all = sorted(self._burnt)[int(_NEARLY_ALL * (len(self._burnt) - 1))]
            return max(_BURNT_S, min(_TIMES_MOST * nearly_all, _TIMES * statistics.median(self._burnt)))
        if len(self._burnt_young) < _YOUNG:
            return _BURNT_YOUNG_S
        return min(_BURNT_YOUNG_S, max(_BURNT_S, _TIMES_MOST * max(self._burnt_young)))


def place_of(pid: int, trace: int) -> str:
    """The line of the user's code that a process of a plain function is at, such as `judge.py:12`.

    `trace`: the descriptor, in that process, of the file that it writes its stack to. Empty before it has done so.
    """
    try:
        text = Path(f"/proc/{pid}/fd/{trace}").read_text(errors="replace")
    except OSError:  # it has ended
        return ""
    frames = [(file, int(line)) for file, line in _FRAME.findall(text.partition(_CALLER)[0])]
    return innermost(frames[::-1], frames[-1][0] if frames else None) if _CALLER in text else ""


def yield_cpu(pids: Iterable[int]) -> None:
    """Let these processes have the CPU only while nobody else wants it (Linux's policy SCHED_IDLE)."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))


def restored(pid: int) -> bool:
    """Undo `yield_cpu` for one process. Returns False where only root may do so: the process has to be replaced."""
    try:
        os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))
    except PermissionError:
        return False
    except ProcessLookupError:  # the controller learns of its end by its socket
        return True
    return True


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU seconds of these processes so far, without those of their children."""
    return sum(map(_cpu_seconds, pids))


def _cpu_seconds(pid: int) -> float:
    try:
        return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3) of the GNU C library
    except OSError:  # it has ended
        return 0.0


def computes(pid: int) -> bool:
    """Whether a process is running, or is ready to run and waits for a CPU."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "R"
    except OSError:  # it has ended
        return False


def memory_left() -> bool:
    """Whether there is enough free memory to start one more process."""
    memory = psutil.virtual_memory()
    return bool(memory.available > _FREE_MEMORY * memory.total)
