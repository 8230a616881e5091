"""Admission: how many prompts may be sent out before the next weight sync, so that responses are not too stale when they are trained on.

The bound is that of `staleness_threshold` in verl's fully asynchronous trainer. Between two syncs the trainer consumes
`sync_every * groups_per_step` groups. With a threshold of s, at most (1 + s) times as many are admitted, including those that were in
flight or waiting at the sync. With s = 0 nothing is generated ahead: every sample is generated under the weights that train on it. This
bounds how many samples are stale. How old a single sample can get has a bound of its own (`mtpctl.controller.rl`).
"""

from __future__ import annotations

import math


class Admission:
    """Counts the groups that were admitted between two syncs. For use in one event loop; not thread-safe."""

    def __init__(self, groups_per_step: int, sync_every: int, threshold: float) -> None:
        self.limit = math.floor(groups_per_step * sync_every * (1 + threshold))
        self._admitted = 0

    @property
    def open(self) -> bool:
        """Whether another group may be sent out before the next sync."""
        return self._admitted < self.limit

    def admit(self) -> None:
        """Count a group that is sent out."""
        assert self.open
        self._admitted += 1

    def drop(self) -> None:
        """Count one group less: it has no signal, and another one is sent out in its place."""
        self._admitted -= 1

    def synced(self, pending: int, trained: int = 0) -> None:
        """Begin the interval after a sync, in which `pending` groups of older weights are in flight or wait to be trained on.

        `trained`: groups of this interval that were trained on already, where a resumed run begins within it.
        """
        self._admitted = pending + trained
