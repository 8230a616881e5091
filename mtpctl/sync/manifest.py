"""What one published version consists of: small, picklable, and readable as JSON beside its buckets."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Literal

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
