"""Who was busy: time of trainer and rollout between two marks, for the idle shares."""

from __future__ import annotations

import time


class BusyClock:
    """Adds up the time in which a side was busy, and in which both were. Two sides: `trainer` and `rollout`."""

    def __init__(self) -> None:
        self._busy = {"trainer": False, "rollout": False}
        self._mark = time.perf_counter()
        self._seconds = {"trainer": 0.0, "rollout": 0.0, "both": 0.0, "wall": 0.0}

    def _advance(self) -> None:
        now = time.perf_counter()
        passed, self._mark = now - self._mark, now
        self._seconds["wall"] += passed
        for side, busy in self._busy.items():
            self._seconds[side] += passed * busy
        self._seconds["both"] += passed * all(self._busy.values())

    def set(self, side: str, busy: bool) -> None:
        """`side` begins or stops working."""
        self._advance()
        self._busy[side] = busy

    def read(self) -> dict[str, float]:
        """Idle shares and overlap since the last reading, and the wall time (s)."""
        self._advance()
        wall = max(self._seconds["wall"], 1e-9)
        shares = {
            "async/trainer_idle": 1 - self._seconds["trainer"] / wall,
            "async/rollout_idle": 1 - self._seconds["rollout"] / wall,
            "async/overlap": self._seconds["both"] / wall,
            "timing_s/step": wall,
        }
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return shares
