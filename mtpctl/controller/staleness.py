"""Admission: whether one more prompt may be sent out, or its responses would be too stale when they are trained on.

The bound has verl's meaning. Between two weight syncs the trainer consumes `sync_every * groups_per_step` groups; with a
threshold of s, at most (1 + s) times as many are let out, those counted in that were already on their way at the sync.
With s = 0 nothing is generated ahead: every sample is of the weights that train on it. That bounds how many samples are stale,
and not how old one gets that takes long: its age has a bound of its own (`mtpctl.controller.rl`).
"""

from __future__ import annotations

import math


class Admission:
    """Counts groups between syncs. Not thread-safe: it lives in the controller's event loop."""

    def __init__(self, groups_per_step: int, sync_every: int, threshold: float) -> None:
        self.limit = math.floor(groups_per_step * sync_every * (1 + threshold))
        self._let_out = 0

    @property
    def open(self) -> bool:
        """Whether one more group may go out before the next sync."""
        return self._let_out < self.limit

    def admit(self) -> None:
        """A group goes out."""
        assert self.open
        self._let_out += 1

    def drop(self) -> None:
        """A group came back without signal and is replaced: it will not be trained on, so it does not count."""
        self._let_out -= 1

    def synced(self, pending: int, trained: int = 0) -> None:
        """New weights are out. `pending` groups, in flight or waiting to be trained on, are of older ones.

        `trained`: groups of this interval that were trained on already, where it is not at its beginning.
        """
        self._let_out = pending + trained
