"""Times of a run, which go on evenly if the clock of the machine is set meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable


def steady_clock() -> Callable[[], float]:
    """A function that returns the seconds since 1970 as they were when the clock was made, plus what has passed since."""
    began, mark = time.time(), time.monotonic()
    return lambda: began + (time.monotonic() - mark)
