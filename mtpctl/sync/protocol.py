"""What a receiver of weights has to offer, and the errors that an update may raise.

A version has sections, `target` (the policy, or in its place `adapter`) and `draft` (its MTP layers), which are received one after the
other. The plan of a section is known before its first byte, so a target checks everything that can be checked (names, shapes, dtypes,
completeness, the version) in `begin_update`, where nothing has changed yet.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Literal, Protocol

from mtpctl.errors import RuntimeFailure
from mtpctl.plan.buckets import Bucket, Entry

Section = Literal["target", "draft", "adapter"]
"""What moves: the policy, its MTP layers, or a LoRA adapter of the policy."""

type JsonObject = dict[str, Any]
"""As `json.loads` makes it."""


@dataclass(frozen=True, slots=True)
class SectionPlan:
    """Buckets of one section in the order in which they travel, and checksums by tensor name where they were taken.

    `config` goes with the section `adapter`: what PEFT writes as `adapter_config.json`.
    """

    buckets: tuple[Bucket, ...]
    checksums: dict[str, str] = field(default_factory=dict)
    config: dict[str, object] = field(default_factory=dict)

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket."""
        return max((bucket.nbytes for bucket in self.buckets), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return sum(bucket.nbytes for bucket in self.buckets)

    def tensors(self) -> dict[str, Entry]:
        """The first entry of every tensor, by name."""
        return {entry.name: entry for bucket in self.buckets for entry in bucket.entries if entry.part_start == 0}


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version: its sections, and where a receiver finds the buckets (`transport` at `address`).

    `store` is the folder in which the version is, or will be, kept for receivers that come later.
    """

    version: int
    transport: str
    address: str
    sections: dict[Section, SectionPlan]
    store: str = ""

    @property
    def nbytes(self) -> int:
        return sum(section.nbytes for section in self.sections.values())

    def to_dict(self) -> JsonObject:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: JsonObject) -> Manifest:
        """Inverse of `to_dict`, also after JSON has turned tuples into lists."""
        sections = {
            name: SectionPlan(buckets_from(section["buckets"]), dict(section["checksums"]), dict(section.get("config", {})))
            for name, section in data["sections"].items()
        }
        return cls(data["version"], data["transport"], data["address"], sections, data.get("store", ""))


def buckets_from(data: list[JsonObject]) -> tuple[Bucket, ...]:
    return tuple(_bucket(bucket) for bucket in data)


@lru_cache(maxsize=8)
def layout(buckets: tuple[Bucket, ...]) -> tuple[str, str]:
    """The JSON form of a section's buckets, and a short name of it: receivers are sent the form once, and later the name alone."""
    text = json.dumps([asdict(bucket) for bucket in buckets])
    return text, hashlib.sha256(text.encode()).hexdigest()[:16]


def _bucket(data: JsonObject) -> Bucket:
    entries = (Entry(**{**entry, "shape": tuple(entry["shape"]), "aliases": tuple(entry["aliases"])}) for entry in data["entries"])
    return Bucket(data["index"], tuple(entries))


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
