"""How long trainer, rollout and rewards were busy between two readings: who waited for whom."""

from __future__ import annotations

import time
from typing import Literal


class BusyClock:
    """Adds up the seconds in which `trainer` and `rollout` were busy, each by itself and both at once, and those of `reward` alone."""

    def __init__(self) -> None:
        self._busy = {"trainer": False, "rollout": False, "reward": False}
        self._mark = time.perf_counter()
        self._seconds = {"trainer": 0.0, "rollout": 0.0, "reward": 0.0, "both": 0.0, "reward alone": 0.0, "wall": 0.0}

    def _advance(self) -> None:
        now = time.perf_counter()
        elapsed, self._mark = now - self._mark, now
        self._seconds["wall"] += elapsed
        for side, busy in self._busy.items():
            self._seconds[side] += elapsed * busy
        self._seconds["both"] += elapsed * (self._busy["trainer"] and self._busy["rollout"])
        self._seconds["reward alone"] += elapsed * (self._busy["reward"] and not (self._busy["trainer"] or self._busy["rollout"]))

    def set(self, side: Literal["trainer", "rollout", "reward"], busy: bool) -> None:
        """Note that one side begins or stops working."""
        self._advance()
        self._busy[side] = busy

    def read(self) -> dict[str, float]:
        """Idle shares and overlap since the last reading, `timing_s/step`, the seconds since then, and those that rewards alone took."""
        self._advance()
        wall = max(self._seconds["wall"], 1e-9)
        shares = {
            "async/trainer_idle": 1 - self._seconds["trainer"] / wall,
            "async/rollout_idle": 1 - self._seconds["rollout"] / wall,
            "async/overlap": self._seconds["both"] / wall,
            "timing_s/step": wall,
            "timing_s/reward_wait": self._seconds["reward alone"],
        }
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return shares
