"""The last version in host memory, and the changes of the next one against it.

The copy is laid out in the buckets of the complete version. A tensor that is larger than a bucket lies in several of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mtpctl.plan.buckets import Bucket, Change, Entry
from mtpctl.sync.delta import compare, encode
from mtpctl.sync.protocol import PlanMismatch, Section
from mtpctl.sync.transports.base import BucketWriter


class HostCopy(BucketWriter):
    """Buckets in host memory, which is allocated once and reused for each version; pinned if the trainer has a card."""

    follows_stream = True

    def __init__(self, *, pinned: bool) -> None:
        self.pinned = pinned
        self.buckets: dict[tuple[str, int], torch.Tensor] = {}

    def begin(self, version: int, section: str) -> None:
        """Nothing to do."""

    def buffer(self, section: str, bucket: Bucket) -> torch.Tensor:
        key = section, bucket.index
        if key not in self.buckets:
            self.buckets[key] = torch.empty(bucket.nbytes, dtype=torch.uint8, pin_memory=self.pinned)
        return self.buckets[key]

    def send(self, section: str, bucket: Bucket) -> None:
        """Nothing to do: the bucket stays in its buffer."""

    def wait(self) -> None:
        """Wait for copies from the card."""
        if self.pinned:
            torch.cuda.current_stream().synchronize()

    def retain(self, sections: Collection[str]) -> None:
        """Free the memory of other sections."""
        self.buckets = {key: copy for key, copy in self.buckets.items() if key[0] in sections}

    def has(self, sections: Collection[str]) -> bool:
        return all((section, 0) in self.buckets for section in sections)

    def parts(self, section: str, entries: Sequence[tuple[Bucket, Entry]]) -> list[torch.Tensor]:
        """The bytes of each entry."""
        return [self.buckets[section, bucket.index][entry.offset : entry.offset + entry.nbytes] for bucket, entry in entries]


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of one version: a `Change` and its blob in host memory for each changed tensor, by section and name.

    `base`: the version to which they apply. `fits`: whether the blobs are small enough to be sent; if not, blobs are missing.
    """

    base: int
    changes: dict[Section, dict[str, Change]] = field(default_factory=dict)
    blobs: dict[Section, dict[str, torch.Tensor]] = field(default_factory=dict)
    fits: bool = True

    def changed(self, section: Section) -> int:
        """Changed elements of a section."""
        return sum(change.changed for change in self.changes[section].values())


class Comparison:
    """Compares the tensors of an export with a copy of version `base`, one after another, in the order of the plan.

    `limit`: maximum bytes of all blobs. `update`: write the new tensors into the copy.
    """

    def __init__(self, copy: HostCopy, base: int, plans: Mapping[Section, Sequence[Bucket]], *, limit: float, update: bool) -> None:
        self.copy, self.base, self.limit, self.update = copy, base, limit, update
        self._changes: dict[Section, dict[str, Change]] = {section: {} for section in plans}
        self._blobs: dict[Section, dict[str, torch.Tensor]] = {section: {} for section in plans}
        self._nbytes = 0
        self._due: dict[tuple[Section, str], list[tuple[Bucket, Entry]]] = {}
        self._aliases: set[tuple[Section, str]] = set()
        for section, buckets in plans.items():
            for bucket in buckets:
                for entry in bucket.entries:
                    self._due.setdefault((section, entry.name), []).append((bucket, entry))
                    self._aliases.update((section, alias) for alias in entry.aliases)

    @torch.no_grad()
    def add(self, section: Section, name: str, tensor: torch.Tensor) -> None:
        """Compare one tensor. Raises PlanMismatch if it is not in the plan, or was added already."""
        if (section, name) in self._aliases:
            return
        entries = self._due.pop((section, name), None)
        if entries is None or (entries[0][1].shape, entries[0][1].dtype) != (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")):
            raise PlanMismatch(f"{name} {tuple(tensor.shape)} {tensor.dtype}: the plan of section {section} has no such tensor")
        new, parts = tensor.detach().contiguous().reshape(-1), self.copy.parts(section, entries)
        moved = [part.to(new.device, non_blocking=True) for part in parts]
        old = torch.cat(moved) if len(moved) > 1 else moved[0]
        old = old.view(new.dtype)
        change, positions = compare(new, old)
        if not change.changed:
            return
        self._changes[section][name] = change
        self._nbytes += change.nbytes(new.element_size())
        if self._nbytes <= self.limit:
            self._blobs[section][name] = encode(new, old, change, positions).cpu()
        else:
            # The version is sent in full.
            self._blobs = {section: {} for section in self._blobs}
        if self.update:
            for (_, entry), part in zip(entries, parts, strict=True):
                part.copy_(new[entry.part_start : entry.part_stop].view(torch.uint8))

    def finish(self) -> Changes:
        """The changes. Raises PlanMismatch if a tensor of the plan was not added."""
        if self._due:
            raise PlanMismatch(f"the export ended without {', '.join(sorted(name for _, name in self._due))}")
        return Changes(self.base, self._changes, self._blobs, self._nbytes <= self.limit)
