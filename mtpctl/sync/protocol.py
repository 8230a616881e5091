"""What a receiver of weights has to offer, and the errors that an update may raise.

A version has sections, `target` (the policy, or in its place `adapter`) and `draft` (its MTP layers), which are received one after the
other. The plan of a section is known before its first byte, so a target checks everything that can be checked (names, shapes, dtypes,
completeness, the version) in `begin_update`, where nothing has changed yet.
"""

from __future__ import annotations

from typing import Literal, Protocol

from mtpctl.errors import RuntimeFailure
from mtpctl.plan.buckets import Bucket
from mtpctl.sync.manifest import Manifest, Section

PauseMode = Literal["keep", "abort", "wait"]
ABORTED_BY_SENDER = "the weight update was aborted by its sender"
"""Text of the error that ends an update on purpose, also where it comes back from another process."""


class SyncError(RuntimeFailure):
    """A weight update failed, and every target still has the weights it had before."""


class PlanMismatch(SyncError):
    """The plan does not fit the live model; the message lists names, shapes or dtypes."""


class VersionConflict(SyncError):
    """The version does not grow, is gone, or another update is under way."""


class TargetDirty(RuntimeFailure):
    """A target holds parts of two versions, or cannot say what it holds: it must be restarted before it serves."""


class WeightsDiffer(RuntimeFailure):
    """The weights after an update are not those that were sent. The target serves no more, and a restart would hide the reason."""


class Published(Protocol):
    """Where a replica that starts late finds the weights that the others serve: a `VersionStore`."""

    def versions(self) -> list[int]:
        """Versions that are there, oldest first."""
        ...

    def open(self, version: int) -> Manifest:
        """The manifest of one of them."""
        ...


class WeightTarget(Protocol):
    """A generator or a log-prob replica, as the sender of weights sees it."""

    @property
    def version(self) -> int:
        """The version whose weights are live."""
        ...

    async def begin_update(self, plan: Manifest, version: int, section: Section) -> None:
        """Check one section of `plan` against the live model. Raises PlanMismatch or VersionConflict; nothing changed."""
        ...

    async def receive(self, *buckets: Bucket) -> None:
        """Receive buckets of the section begun last, which follow each other. All come once, in the plan's order."""
        ...

    async def finish_update(self) -> None:
        """Make the section live under the version of `begin_update`. Raises SyncError if a bucket is missing."""
        ...

    async def abort_update(self) -> None:
        """Give up the section begun last, and return to the version before it. Raises TargetDirty where it cannot."""
        ...

    async def checksums(self) -> dict[str, str]:
        """Checksum of every tensor received so far, by its wire name."""
        ...

    def distrust(self) -> None:
        """The live weights are not known to be those that were sent: serve nothing from them any more."""
        ...
