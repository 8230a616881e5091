"""Measures over a whole stage how long the trainer waited for samples, and names the recipe keys that shorten the wait."""

from __future__ import annotations

from collections.abc import Mapping

from mtpctl.recipe.schema import Recipe

MIN_UPDATES = 5
"""A hint needs more updates than this. The first update is not counted in the times, because it also waits for generation to start."""
HIGH_IDLE = 0.5
"""Idle share of the trainer's time from which generation is the bottleneck."""


class IdleTrainer:
    """Accumulates the idle times of the trainer and of the engines."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._updates = 0
        self._seconds = self._trainer_idle_s = self._rollout_idle_s = 0.0

    def observe(self, times: Mapping[str, float]) -> None:
        """Add an update. times: the result of `BusyClock.read`."""
        self._updates += 1
        if self._updates > 1:
            seconds = times["timing_s/step"]
            self._seconds += seconds
            self._trainer_idle_s += seconds * times["async/trainer_idle"]
            self._rollout_idle_s += seconds * times["async/rollout_idle"]

    def hint(self) -> str | None:
        """A line for the end of the stage; None if generation was not the bottleneck, or if there were too few updates."""
        if self._updates <= MIN_UPDATES or self._seconds <= 0:
            return None
        idle, rollout_idle = self._trainer_idle_s / self._seconds, self._rollout_idle_s / self._seconds
        if idle < HIGH_IDLE or rollout_idle > idle / 2:
            return None
        return f"the trainer waited for samples {idle:.0%} of the time (async/trainer_idle); {self._fix()}"

    def _fix(self) -> str:
        rollout, train = self._recipe.rollout, self._recipe.train
        if self._recipe.device == "cpu":
            return "raise rollout.replicas if the machine has idle cores, or rollout.max_in_flight"
        ways = ["raise rollout.replicas (for a small model with several engines per GPU, for example rollout.gpus: 0.3)"]
        if rollout.tp == 1 and not rollout.elastic and not rollout.on_trainer_gpus and train.gpus == 1:
            ways.append("run an engine on the trainer's GPU as well (rollout.on_trainer_gpus: 1, train.gpus: 0.5, sync.transport: ipc)")
        return ", or ".join(ways)
