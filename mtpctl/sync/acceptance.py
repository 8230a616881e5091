"""Detects a collapse of draft acceptance after a sync: drafts of outdated or wrong weights are almost always rejected.

Acceptance is measured in windows of `WINDOW` drafts, and averaged over the last `REMEMBERED` windows. A collapse is a first window under a
new version with less than half of the running mean.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from mtpctl.samples import Sample

WINDOW = 200
REMEMBERED = 10
SHARE = 0.5
EXPECTED = 20
"""A collapse is reported only if a window at the running mean has at least this number of accepted drafts."""


@dataclass(frozen=True, slots=True)
class Collapse:
    """Acceptance over the first drafts under `version`, and before it."""

    version: int
    acceptance: float
    before: float

    def __str__(self) -> str:
        return (
            f"draft acceptance fell to {self.acceptance:.1%} over the {WINDOW} drafts after the sync of version {self.version}, "
            f"from {self.before:.1%} before: the drafter's weights may not be the trainer's (sync.verify: always compares them)"
        )


class AcceptanceWatch:
    """Compares the first window of drafts after each sync with the running mean."""

    def __init__(self) -> None:
        self._windows: deque[float] = deque(maxlen=REMEMBERED)
        self._version = 0
        self._checked = True
        self._drafted = self._accepted = 0

    @property
    def mean(self) -> float:
        """The running mean; 0 before the first window."""
        return sum(self._windows) / len(self._windows) if self._windows else 0.0

    def synced(self, version: int) -> None:
        """Report that `version` is live."""
        self._version, self._checked = version, False
        self._drafted = self._accepted = 0

    def take(self, sample: Sample) -> Collapse | None:
        """Count a sample if the live version drafted most of its tokens. Returns a collapse at the end of a version's first window."""
        new = sum(span.end - span.start for span in sample.version_spans if span.version >= self._version)
        if 2 * new <= len(sample.response_ids):
            return None
        self._drafted += sample.speculation.drafted
        self._accepted += sample.speculation.accepted
        if self._drafted < WINDOW:
            return None
        acceptance, before = self._accepted / self._drafted, self.mean
        checked, self._checked = self._checked, True
        self._drafted = self._accepted = 0
        if not checked and before * WINDOW >= EXPECTED and acceptance < SHARE * before:
            return Collapse(self._version, acceptance, before)
        self._windows.append(acceptance)
        return None
