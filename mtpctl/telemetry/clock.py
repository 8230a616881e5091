"""Timestamps of a run, which are not affected if the clock of the machine is adjusted."""

from __future__ import annotations

import time
from collections.abc import Callable


def steady_clock() -> Callable[[], float]:
    """A function that returns seconds since 1970: the time at creation plus the monotonic time elapsed since."""
    began, mark = time.time(), time.monotonic()
    return lambda: began + (time.monotonic() - mark)
