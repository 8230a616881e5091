"""What one published version consists of: small, picklable, and readable as JSON beside its buckets."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from mtpctl.plan import Bucket, Entry


@dataclass(frozen=True, slots=True)
class SectionPlan:
    """Buckets of one section in the order in which they travel, and checksums by tensor name where they were taken."""

    buckets: tuple[Bucket, ...]
    checksums: dict[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return sum(bucket.nbytes for bucket in self.buckets)

    def tensors(self) -> dict[str, Entry]:
        """The first entry of every tensor, by name."""
        return {entry.name: entry for bucket in self.buckets for entry in bucket.entries if entry.part_start == 0}


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version: its sections, and where a receiver on this host finds the buckets (`transport` at `address`)."""

    version: int
    transport: str
    address: str
    sections: dict[str, SectionPlan]

    @property
    def nbytes(self) -> int:
        """Bytes of all sections."""
        return sum(section.nbytes for section in self.sections.values())

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Manifest:
        """Inverse of `to_dict`, also after JSON has turned tuples into lists."""
        sections = {
            name: SectionPlan(tuple(_bucket(bucket) for bucket in section["buckets"]), dict(section["checksums"]))
            for name, section in data["sections"].items()
        }
        return cls(data["version"], data["transport"], data["address"], sections)


def _bucket(data: dict[str, Any]) -> Bucket:
    entries = (Entry(**{**entry, "shape": tuple(entry["shape"]), "aliases": tuple(entry["aliases"])}) for entry in data["entries"])
    return Bucket(data["index"], tuple(entries))
