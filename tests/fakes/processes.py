"""Whether processes still run, asked of those that may end at any moment."""

from __future__ import annotations

import psutil


def runs(process: psutil.Process | int) -> bool:
    """Whether the process, or the one of this id, has not ended. One that has ended and is not yet waited for does not run."""
    try:
        return (psutil.Process(process) if isinstance(process, int) else process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
