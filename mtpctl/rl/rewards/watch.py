"""What a process of a reward function does, seen from outside, and what calls of one function usually take."""

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

_LONG_S, _TIMES = 0.05, 10  # a call is long beyond so many seconds, and so many times the median of the last calls
_FIRST_S, _VERY_FIRST_S = 1.0, 2.0  # the first call of a process, and of all, may have to load something
_BURNT_S, _TIMES_MOST = 0.01, 3  # it computes for long beyond so many CPU seconds, and so many times what nearly all of the last calls took
_YOUNG, _BURNT_YOUNG_S = 5, 0.25  # the first calls of a process are compared with those of others, and with this before there are any
_LAST, _LAST_YOUNG = 64, 16
_NEARLY_ALL = 0.95
_FREE_MEMORY = 0.1  # share of the memory below which no process is started beside
_FRAME = re.compile(r'File "(.*)", line (\d+) in ')  # of the module faulthandler, the innermost first
_CALLER = 'mtpctl/rl/rewards/function.py"'


class Usual:
    """What the last calls of a function took, and when one takes far longer than they did. `answered`: calls of its process before it."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_LAST)
        self._burnt: deque[float] = deque(maxlen=_LAST)
        self._burnt_young: deque[float] = deque(maxlen=_LAST_YOUNG)

    def add(self, seconds: float, burnt: float, answered: int) -> None:
        """Note a call that is over: seconds on the clock, and of CPU."""
        self._seconds.append(seconds)
        (self._burnt if answered >= _YOUNG else self._burnt_young).append(burnt)

    def long_s(self, answered: int) -> float:
        """The seconds on the clock beyond which a call is long."""
        least = _LONG_S if answered else _FIRST_S if self._seconds else _VERY_FIRST_S
        return max(least, _TIMES * statistics.median(self._seconds or [0.0]))

    def burnt_s(self, answered: int) -> float:
        """The CPU seconds beyond which a call computes for long. By the clock any call is long on a busy machine.

        Where several of the last calls hung themselves, the median still tells what most take.
        """
        if answered >= _YOUNG and self._burnt:
            nearly_all = sorted(self._burnt)[int(_NEARLY_ALL * (len(self._burnt) - 1))]
            return max(_BURNT_S, min(_TIMES_MOST * nearly_all, _TIMES * statistics.median(self._burnt)))
        if len(self._burnt_young) < _YOUNG:
            return _BURNT_YOUNG_S
        return min(_BURNT_YOUNG_S, max(_BURNT_S, _TIMES_MOST * max(self._burnt_young)))


def place_of(pid: int, trace: int) -> str:
    """`judge.py:12`: where a process of a plain function is, once it has written that into its file `trace`; empty before."""
    try:
        text = Path(f"/proc/{pid}/fd/{trace}").read_text(errors="replace")
    except OSError:  # it has ended
        return ""
    frames = [(file, int(line)) for file, line in _FRAME.findall(text.partition(_CALLER)[0])]
    return innermost(frames[::-1], frames[-1][0] if frames else None) if _CALLER in text else ""


def yield_cpu(pids: Iterable[int]) -> None:
    """Have processes compute only where nobody else wants the CPU (Linux's idle policy)."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))


def restored(pid: int) -> bool:
    """Give a process its priority back. False where only root may, so that it has to be replaced."""
    try:
        os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))
    except PermissionError:
        return False
    except ProcessLookupError:  # its end is told by its socket
        return True
    return True


def cpu_seconds(pids: Iterable[int]) -> float:
    """What processes have computed so far, each without what it has started."""
    return sum(map(_cpu_seconds, pids))


def _cpu_seconds(pid: int) -> float:
    try:
        return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3) of the GNU C library
    except OSError:  # it has ended
        return 0.0


def started_by(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have started."""
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended
        return []
    return [each for child in children for each in (child, *started_by(child))]


def computes(pid: int) -> bool:
    """Whether a process is computing, or would if it had a CPU."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "R"
    except OSError:  # it has ended
        return False


def memory_left() -> bool:
    """Whether there is memory for one process more than are needed."""
    memory = psutil.virtual_memory()
    return bool(memory.available > _FREE_MEMORY * memory.total)
