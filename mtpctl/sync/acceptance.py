"""Whether drafts are still accepted after a sync: a drafter with old or wrong weights is rejected almost always.

Acceptance is measured in windows of `WINDOW` drafts. Its running mean is that of the last `REMEMBERED` windows. If the first window
under a new version has less than half of the running mean, that is a collapse.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from mtpctl.samples import Sample

WINDOW = 200
REMEMBERED = 10
SHARE = 0.5
EXPECTED = 20
"""Accepted drafts that a window at the running mean has, at least, for a collapse to be reported: fewer prove nothing."""


@dataclass(frozen=True, slots=True)
class Collapse:
    """Acceptance over the first drafts under `version`, and what it was before."""

    version: int
    found: float
    before: float

    def __str__(self) -> str:
        return (
            f"draft acceptance fell to {self.found:.1%} over the {WINDOW} drafts after the sync of version {self.version}, "
            f"from {self.before:.1%} before: the drafter's weights may not be the trainer's (sync.verify: always compares them)"
        )


class AcceptanceWatch:
    """Counts the drafts of finished samples, and compares the first window after each sync with the running mean."""

    def __init__(self) -> None:
        self._windows: deque[float] = deque(maxlen=REMEMBERED)
        self._version = 0
        self._judged = True
        self._drafted = self._accepted = 0

    @property
    def mean(self) -> float:
        """The running mean; 0 before the first window."""
        return sum(self._windows) / len(self._windows) if self._windows else 0.0

    def synced(self, version: int) -> None:
        """`version` is live from now on. Its first window is compared with the running mean."""
        self._version, self._judged = version, False
        self._drafted = self._accepted = 0

    def take(self, sample: Sample) -> Collapse | None:
        """Count a sample if the live version drafted most of its tokens. A version's first window may be a collapse."""
        new = sum(span.end - span.start for span in sample.version_spans if span.version >= self._version)
        if 2 * new <= len(sample.response_ids):
            return None
        self._drafted += sample.speculation.drafted
        self._accepted += sample.speculation.accepted
        if self._drafted < WINDOW:
            return None
        found, before = self._accepted / self._drafted, self.mean
        judged, self._judged = self._judged, True
        self._drafted = self._accepted = 0
        if not judged and before * WINDOW >= EXPECTED and found < SHARE * before:
            return Collapse(self._version, found, before)
        self._windows.append(found)
        return None
