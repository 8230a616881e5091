"""Questions about processes that may end at any moment."""

from __future__ import annotations

import psutil


def runs(process: psutil.Process | int) -> bool:
    """Whether the process, or the one with this id, is running. A zombie counts as ended."""
    try:
        return (psutil.Process(process) if isinstance(process, int) else process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_line(process: psutil.Process) -> str:
    """The words of a process's command line; empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # also of a zombie
        return ""
