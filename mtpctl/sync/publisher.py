"""The sender: packs a stream of named tensors into buckets, and publishes them as one version.

`Publisher` writes them where receivers fetch them (`shm`). `sender.py` has the one whose receivers take part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mtpctl.plan.buckets import Bucket, Entry, TensorSpec, plan_buckets
from mtpctl.sync.checksums import checksum
from mtpctl.sync.manifest import Manifest, SectionPlan
from mtpctl.sync.protocol import PlanMismatch, Section
from mtpctl.sync.store import VersionStore
from mtpctl.sync.transports.base import BucketWriter
from mtpctl.sync.transports.shm import NAME as SHM
from mtpctl.sync.transports.shm import Writer

Export = Iterable[tuple[str, torch.Tensor]]


def default_section(name: str) -> Section:
    """The section of a Hugging Face name, by how MTP layers are called where their names say so."""
    return "draft" if name.startswith("mtp.") or ".mtp_layers." in name or ".mtp." in name else "target"


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Name, shape and dtype of a tensor as the plan wants them."""
    return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _tied(tensors: Sequence[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Names of tensors that are another one's very memory, each with that other name."""
    owners: dict[tuple[object, ...], str] = {}
    tied = {}
    for name, tensor in tensors:
        owner = owners.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype), name)
        if owner != name and tensor.numel():
            tied[name] = owner
    return tied


class Packing:
    """The plan of a stream of tensors, and their way into a transport's buffers.

    `bucket_bytes` bounds a bucket, `sections` says what there is to move, `section_of` sorts names into sections, and `dtype` is
    what floating-point tensors are cast to on the way (None: sent as they are). `config`: what goes along with a section.
    `moving`: the sections of the next version, all of them until it is set.
    """

    def __init__(
        self,
        *,
        bucket_bytes: int,
        sections: Sequence[Section] = ("target", "draft"),
        section_of: Callable[[str], Section] = default_section,
        dtype: torch.dtype | None = None,
        config: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        self.config = dict(config or {})
        self.bucket_bytes = bucket_bytes
        self.sections = self.moving = tuple(sections)
        self.section_of = cache(section_of)
        self.dtype = dtype
        self.plans: dict[str, tuple[Bucket, ...]] = {}

    def plan(self, specs: Iterable[TensorSpec], aliases: Mapping[str, str] | None = None) -> None:
        """Fix the plan of all later versions, so that an export need not be held whole to learn it.

        `aliases` maps names of tied weights to the name that carries them.
        """
        sorted_specs: dict[str, list[TensorSpec]] = {section: [] for section in self.sections}
        for spec in specs:
            if (section := self.section_of(spec.name)) in sorted_specs:
                sorted_specs[section].append(spec)
        for place, found in sorted_specs.items():
            names = {spec.name for spec in found}
            tied = {alias: owner for alias, owner in (aliases or {}).items() if owner in names}
            if found:
                self.plans[place] = tuple(plan_buckets(found, self.bucket_bytes, tied))

    def learn(self, export: Export, aliases: Mapping[str, str] | None = None, *, checksums: bool = False) -> dict[str, dict[str, str]]:
        """Run through an export without keeping any of it, to plan; with `checksums`, take and return them by section."""
        specs: list[TensorSpec] = []
        sums: dict[str, dict[str, str]] = {section: {} for section in self.moving}
        for name, tensor in self._cast(export):
            specs.append(spec_of(name, tensor))
            if checksums:
                sums[self.section_of(name)][name] = checksum(tensor)
        if not self.plans:
            self.plan(specs, aliases)
        return sums

    def _cast(self, export: Export) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in export:
            if self.section_of(name) in self.moving:
                cast = self.dtype is not None and tensor.is_floating_point()
                yield name, tensor.to(self.dtype) if cast else tensor

    def section_plans(self, sums: Mapping[str, dict[str, str]]) -> dict[str, SectionPlan]:
        """What moves next, with these checksums."""
        plans = {section: buckets for section, buckets in self.plans.items() if section in self.moving}
        return {section: SectionPlan(buckets, sums.get(section, {}), self.config.get(section, {})) for section, buckets in plans.items()}

    @torch.no_grad()
    def pack(self, tensors: Iterable[tuple[str, torch.Tensor]], writer: BucketWriter, checksums: bool = False) -> dict[str, dict[str, str]]:
        """Fill buckets in the plan's order while the export streams, each section at its own pace. Raises PlanMismatch."""
        packers = {section: _Packer(section, buckets, writer) for section, buckets in self.plans.items() if section in self.moving}
        sums: dict[str, dict[str, str]] = {section: {} for section in packers}
        for name, tensor in tensors:
            section = self.section_of(name)
            if section not in packers:
                raise PlanMismatch(f"{name}: section {section} is not in the plan")
            packers[section].add(spec_of(name, tensor), tensor)
            if checksums:
                sums[section][name] = checksum(tensor)
        for packer in packers.values():
            packer.finish()
        return sums


class Publisher(Packing):
    """Publishes into a `VersionStore` on this host, from which receivers draw. Options are those of `Packing`."""

    def __init__(self, store: VersionStore, **options: Any) -> None:
        super().__init__(**options)
        self.store = store

    def publish(self, export: Export, version: int, *, checksums: bool = False) -> Manifest:
        """Pack and publish one version. Until it returns, receivers see the version before.

        `export` yields Hugging Face names with full tensors. Unless `plan` or `learn` was called, the first export is held whole
        to learn its shapes; later ones stream. With `checksums`, one is taken of each tensor for receivers to compare with.

        Raises VersionConflict unless `version` grows, PlanMismatch where the export differs from the plan, and
        EnvironmentMissing where the store is full; a failed version leaves nothing behind.
        """
        tensors = self._cast(export)
        if not self.plans:
            held = list(tensors)
            self.plan((spec_of(name, tensor) for name, tensor in held), _tied(held))
            tensors = iter(held)
        folder = self.store.prepare(version)
        try:
            sums = self.pack(tensors, Writer(folder), checksums)
            address = str(Path(folder).absolute())
            manifest = Manifest(version, SHM, address, self.section_plans(sums), str(self.store.root.absolute()))
            self.store.commit(manifest)
        except BaseException:
            self.store.discard(version)
            raise
        return manifest


class _Packer:
    """Copies the tensors of one section to their places."""

    def __init__(self, section: str, buckets: Sequence[Bucket], writer: BucketWriter) -> None:
        self.section = section
        self.writer = writer
        self.aliases = {alias for bucket in buckets for entry in bucket.entries for alias in entry.aliases}
        self.places = [(bucket, entry) for bucket in buckets for entry in bucket.entries]
        self.next = 0
        self.buffer: torch.Tensor | None = None

    def add(self, spec: TensorSpec, tensor: torch.Tensor) -> None:
        if spec.name in self.aliases:
            return
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        while True:
            bucket, entry = self._expect(spec)
            if self.buffer is None:
                self.buffer = self.writer.buffer(self.section, bucket)
            start = entry.part_start * spec.itemsize
            piece = data[start : start + entry.nbytes]
            self.buffer[entry.offset : entry.offset + entry.nbytes].copy_(piece, non_blocking=self.writer.in_order)
            self.next += 1
            if entry is bucket.entries[-1]:
                self.writer.send(self.section, bucket)
                self.buffer = None
            if entry.last:
                return

    def _expect(self, spec: TensorSpec) -> tuple[Bucket, Entry]:
        if self.next == len(self.places):
            raise PlanMismatch(f"{spec.name}: not in the plan of section {self.section}, which is complete")
        bucket, entry = self.places[self.next]
        if (entry.name, entry.shape, entry.dtype) != (spec.name, spec.shape, spec.dtype):
            raise PlanMismatch(
                f"{spec.name} {spec.shape} {spec.dtype}: the plan of section {self.section} "
                f"has {entry.name} {entry.shape} {entry.dtype} here"
            )
        return bucket, entry

    def finish(self) -> None:
        if self.next < len(self.places):
            missing = sorted({entry.name for _, entry in self.places[self.next :]})
            raise PlanMismatch(f"the export ended without {', '.join(missing)}")
