"""The data and interfaces of weight updates: manifests, the errors of an update, and the interface of a receiver.

A version has sections, which are received one after the other: `target` (the policy) and `draft` (its MTP layers). If an adapter is synced,
`adapter` replaces `target`, except in the first version, which has both. The plan of a section is known before its first byte, so
`begin_update` checks names, shapes, dtypes, completeness and the version before anything is written.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any, Literal, Protocol

from mtpctl.errors import RuntimeFailure
from mtpctl.plan.buckets import Bucket, Change, Entry

Section = Literal["target", "draft", "adapter"]
"""The policy, its MTP layers, or a LoRA adapter of the policy."""

type JsonObject = dict[str, Any]

PauseMode = Literal["keep", "abort", "wait"]
ABORTED_BY_SENDER = "the weight update was aborted by its sender"
"""Message of the error that a worker raises in the step `abort` of an update. Engines may wrap this error in an error of another type."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The changes of one section since the base version: a `Change` for each changed tensor, and the buckets of blobs (uint8)."""

    buckets: tuple[Bucket, ...]
    changes: dict[str, Change]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_dict(cls, data: JsonObject) -> Delta:
        """Inverse of `to_json`, from the loaded JSON."""
        return cls(buckets_from(data["buckets"]), {name: Change(**change) for name, change in data["changes"].items()})


@dataclass(frozen=True, slots=True)
class SectionPlan:
    """Buckets of one section in the order of transfer, and the checksum of each tensor, if computed.

    `config`: for the section `adapter`, the content of PEFT's `adapter_config.json`. If there is a `delta`, its buckets are sent instead.
    `num_changed`: number of elements that differ from the previous version, None if they were not compared.
    """

    buckets: tuple[Bucket, ...]
    checksums: dict[str, str] = field(default_factory=dict)
    config: dict[str, object] = field(default_factory=dict)
    delta: Delta | None = None
    num_changed: int | None = None

    @property
    def numel(self) -> int:
        return sum(prod(entry.shape) for entry in self.tensors().values())

    @property
    def wire_buckets(self) -> tuple[Bucket, ...]:
        """The buckets to transfer."""
        return self.buckets if self.delta is None else self.delta.buckets

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket to transfer."""
        return max((bucket.nbytes for bucket in self.wire_buckets), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes to transfer."""
        return sum(bucket.nbytes for bucket in self.wire_buckets)

    def tensors(self) -> dict[str, Entry]:
        """The first entry of every tensor, by name."""
        return {entry.name: entry for bucket in self.buckets for entry in bucket.entries if entry.part_start == 0}


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version: its sections, and the transport and address at which receivers get the buckets.

    `store` is the folder of the version store that keeps the version for receivers that start later. `base`: the version to which the
    deltas of the sections apply, None if they are complete. `digests`: digests of the files of the transport `storage`, by name, if hosts
    relay them. `relay` and `hops` differ per receiver: the host from which it downloads these files, and the number of hosts before it in
    the chain of relays (`mtpctl.sync.remote`).
    """

    version: int
    transport: str
    address: str
    sections: dict[Section, SectionPlan]
    store: str = ""
    base: int | None = None
    digests: dict[str, str] = field(default_factory=dict)
    relay: str = ""
    hops: int = 0

    @property
    def nbytes(self) -> int:
        return sum(section.nbytes for section in self.sections.values())

    def to_dict(self) -> JsonObject:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: JsonObject) -> Manifest:
        """Inverse of `to_dict`, also after a round trip through JSON. Relays are dropped."""
        sections = {
            name: SectionPlan(
                buckets_from(section["buckets"]),
                dict(section["checksums"]),
                dict(section.get("config", {})),
                Delta.from_dict(delta) if (delta := section.get("delta")) else None,
                section.get("num_changed"),
            )
            for name, section in data["sections"].items()
        }
        address, store, base = data["address"], data.get("store", ""), data.get("base")
        return cls(data["version"], data["transport"], address, sections, store, base, dict(data.get("digests", {})))

    def complete(self) -> Manifest:
        """The manifest of the complete version, without deltas."""
        return replace(self, base=None, sections={name: replace(section, delta=None) for name, section in self.sections.items()})


def buckets_from(data: list[JsonObject]) -> tuple[Bucket, ...]:
    """Buckets from their JSON form."""

    def entry_from(entry: JsonObject) -> Entry:
        return Entry(**{**entry, "shape": tuple(entry["shape"]), "aliases": tuple(entry["aliases"])})

    return tuple(Bucket(bucket["index"], tuple(map(entry_from, bucket["entries"]))) for bucket in data)


def bucket_file(section: str, bucket: Bucket) -> str:
    """The name of a bucket's file, for transports with files."""
    return f"{section}-{bucket.index:05d}.bin"


@lru_cache(maxsize=8)
def layout(buckets: tuple[Bucket, ...]) -> tuple[str, str]:
    """The JSON of a section's buckets, and a short hash of it. Receivers get the JSON once, and later only the hash."""
    text = json.dumps([asdict(bucket) for bucket in buckets])
    return text, hashlib.sha256(text.encode()).hexdigest()[:16]


class SyncError(RuntimeFailure):
    """A weight update failed. Each target has its previous weights, or the new ones if it had already committed."""


class PlanMismatch(SyncError):
    """The plan does not fit the live model; the message lists the names, shapes or dtypes."""


class VersionConflict(SyncError):
    """The version is not newer, is not available, is a delta to a version that is not live, or another update is in progress."""


class TargetDirty(RuntimeFailure):
    """The weights of a target may be a mix of two versions. It must be restarted before it serves again."""


class WeightsDiffer(RuntimeFailure):
    """The checksums after an update differ. The target stops serving; it is not restarted, because that would hide the cause."""


class PublishedVersions(Protocol):
    """Stored weight versions, from which a restarted replica is updated. Implemented by `VersionStore`."""

    def versions(self) -> list[int]:
        """Available versions, oldest first."""
        ...

    def open(self, version: int) -> Manifest:
        """The manifest of an available version."""
        ...


class WeightTarget(Protocol):
    """A receiver of weights: a generator or a log-prob replica."""

    @property
    def version(self) -> int:
        """The version of the live weights."""
        ...

    async def begin_update(self, plan: Manifest, version: int, section: Section) -> None:
        """Check a section of `plan` against the live model. Raises PlanMismatch or VersionConflict before any weight has changed."""
        ...

    async def receive(self, *buckets: Bucket) -> None:
        """Receive consecutive buckets of the current section. Each bucket is received once, in the plan's order."""
        ...

    async def finish_update(self) -> None:
        """Make the section live under the version of `begin_update`. Raises SyncError if a bucket is missing."""
        ...

    async def abort_update(self) -> None:
        """Cancel the current section and return to the previous version. Raises TargetDirty if that fails."""
        ...

    async def checksums(self, *sections: Section) -> dict[str, str]:
        """Checksums by wire name of the live tensors that the last updates of `sections` contained; by default of all received sections.

        A target may return checksums of further tensors.
        """
        ...

    def mark_dirty(self) -> None:
        """Stop serving from the live weights, because they may differ from those that were sent."""
        ...
