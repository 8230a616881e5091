"""Plans the buckets of a sender, and packs exported tensors, or their changes since the last version, into them.

The plan is computed once from names, shapes and dtypes. `pack` then streams every export into the buffers of a transport, so an export is
never in memory as a whole. `HostCopy` stores the last version, in the same buckets as a complete transfer. A tensor that is larger than a
bucket spans several of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Required, TypedDict, Unpack

import torch

from mtpctl.families.quantization import SCALE_SUFFIX
from mtpctl.kernels.block_fp8 import FiniteChecks, quantize_all
from mtpctl.plan.buckets import ALIGNMENT, MAX_DELTA_SHARE, Bucket, Change, Entry, TensorSpec, plan_buckets
from mtpctl.sync.checksums import checksum
from mtpctl.sync.delta import compare, encode
from mtpctl.sync.parameters import WORD_BYTES, as_words, is_word_aligned
from mtpctl.sync.protocol import Delta, PlanMismatch, Section, SectionPlan, SyncError
from mtpctl.sync.transports.base import BucketWriter

QUANTIZED_BYTES = 192 << 20
"""Exported tensors are quantized together at this many bytes. Until then they stay in memory, and may be views of larger tensors."""
MAX_PENDING_BYTES = 64 << 20
"""Copies into a bucket are started together at this many bytes. Until then their sources stay in memory."""
PREFETCH_BYTES = 256 << 20
"""Largest tensor whose previous values are copied to the GPU ahead of time, which bounds the additional GPU memory."""


class HostCopy(BucketWriter):
    """Buckets in host memory, which is allocated once and reused for each version; pinned if the trainer has a GPU."""

    stream_ordered = True

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
        """Wait for copies from the GPU."""
        if self.pinned:
            torch.cuda.current_stream().synchronize()

    def retain(self, sections: Collection[str]) -> None:
        """Free the memory of all sections that are not in `sections`."""
        self.buckets = {key: copy for key, copy in self.buckets.items() if key[0] in sections}

    def has(self, sections: Collection[str]) -> bool:
        return all((section, 0) in self.buckets for section in sections)


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of one version: a `Change` and its blob in host memory for each changed tensor, by section and name.

    `base`: the version to which they apply. `fits`: whether the blobs are small enough to be sent; if not, there are none.
    """

    base: int
    changes: dict[Section, dict[str, Change]] = field(default_factory=dict)
    blobs: dict[Section, dict[str, torch.Tensor]] = field(default_factory=dict)
    fits: bool = True

    def num_changed(self, section: Section) -> int:
        """Number of changed elements in a section."""
        return sum(change.num_changed for change in self.changes[section].values())


class Comparison:
    """Compares the tensors of an export with a copy of version `base`, one after another, in the order of the plan.

    `limit`: maximum bytes of all blobs. `update`: write the new tensors into the copy.

    On a GPU, the values that the next tensor has in version `base` are copied on a second stream, while this tensor is compared.
    """

    def __init__(self, copy: HostCopy, base: int, plans: Mapping[Section, Sequence[Bucket]], *, limit: float, update: bool) -> None:
        self.copy, self.base, self.limit, self.update = copy, base, limit, update
        self._changes: dict[Section, dict[str, Change]] = {section: {} for section in plans}
        self._blobs: dict[Section, dict[str, torch.Tensor]] = {section: {} for section in plans}
        self._nbytes = 0
        self._pending: dict[tuple[Section, str], list[tuple[Bucket, Entry]]] = {}
        self._aliases: set[tuple[Section, str]] = set()
        self._prefetched: dict[tuple[Section, str], torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        for section, buckets in plans.items():
            for bucket in buckets:
                for entry in bucket.entries:
                    self._pending.setdefault((section, entry.name), []).append((bucket, entry))
                    self._aliases.update((section, alias) for alias in entry.aliases)

    @torch.no_grad()
    def add(self, section: Section, name: str, tensor: torch.Tensor) -> None:
        """Compare one tensor. Raises PlanMismatch if it is not in the plan, or was added already."""
        if (section, name) in self._aliases:
            return
        entries = self._pending.get((section, name))
        spec = spec_of(name, tensor)
        if entries is None or (entries[0][1].shape, entries[0][1].dtype) != (spec.shape, spec.dtype):
            raise PlanMismatch(f"{name} {spec.shape} {spec.dtype}: the plan of section {section} has no such tensor")
        new = tensor.detach().contiguous().reshape(-1)
        old = self._previous((section, name), new.device).view(new.dtype)
        change, positions = compare(new, old)
        if not change.num_changed:
            return
        self._changes[section][name] = change
        self._nbytes += change.nbytes(new.element_size())
        if self._nbytes <= self.limit:
            self._blobs[section][name] = encode(new, old, change, positions).cpu()
        else:
            # The changes are too large, so the version will be sent in full and the blobs are not needed.
            self._blobs = {section: {} for section in self._blobs}
        if self.update:
            for (_, entry), old_part in zip(entries, self._parts(section, entries), strict=True):
                old_part.copy_(new[entry.part_start : entry.part_stop].view(torch.uint8), non_blocking=self.copy.pinned)

    def _parts(self, section: Section, entries: Sequence[tuple[Bucket, Entry]]) -> list[torch.Tensor]:
        """The bytes of a tensor in the copy, one view for each entry."""
        return [self.copy.buckets[section, bucket.index][entry.offset : entry.offset + entry.nbytes] for bucket, entry in entries]

    def _previous(self, key: tuple[Section, str], device: torch.device) -> torch.Tensor:
        """The previous values of a pending tensor as bytes on `device`. Starts to copy those of the next pending tensor."""
        old = self._prefetched.pop(key, None)
        if old is None or old.device != device:
            old = self._fetch(key, device)
        del self._pending[key]
        if self._stream is not None and old.is_cuda:
            # Wait here, before the next tensor's copy is enqueued, so that the current stream waits only for the copy of this tensor.
            torch.cuda.current_stream(device).wait_stream(self._stream)
        following = next(iter(self._pending), None)
        nbytes = sum(entry.nbytes for _, entry in self._pending[following]) if following is not None else 0
        if following is not None and following not in self._prefetched and nbytes <= PREFETCH_BYTES:
            self._prefetched[following] = self._fetch(following, device)
        return old

    def _fetch(self, key: tuple[Section, str], device: torch.device) -> torch.Tensor:
        """Start to copy the previous values of a tensor to `device`."""
        parts = self._parts(key[0], self._pending[key])
        if device.type != "cuda":
            return torch.cat(parts) if len(parts) > 1 else parts[0]
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        # Allocated on the current stream, so that the allocator caches no memory for the second one. Kernels enqueued earlier may still use
        # the block that the allocator returns, so the second stream waits for them.
        old = torch.empty(sum(map(len, parts)), dtype=torch.uint8, device=device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            for destination, part in zip(old.split([*map(len, parts)]), parts, strict=True):
                destination.copy_(part, non_blocking=True)
        old.record_stream(self._stream)
        return old

    def finish(self) -> Changes:
        """Wait until the copy is updated, and return the changes. Raises PlanMismatch if a tensor of the plan was not added."""
        self.copy.wait()
        if self._pending:
            raise PlanMismatch(f"the export ended without {', '.join(sorted(name for _, name in self._pending))}")
        return Changes(self.base, self._changes, self._blobs, self._nbytes <= self.limit)


Export = Iterable[tuple[str, torch.Tensor]]
"""Hugging Face names with full tensors."""

Checksums = dict[Section, dict[str, str]]
"""Checksum of each tensor, by section and name."""


class PackingOptions(TypedDict, total=False):
    """Options of every sender.

    Attributes:
        bucket_bytes: maximum size of a bucket.
        sections: all sections that are ever sent.
        section_of: maps a tensor's name to its section.
        quantized: names of the matrices that are sent in FP8, each followed by its scales.
        config: sent with a section, see `SectionPlan`.
    """

    bucket_bytes: Required[int]
    sections: Sequence[Section]
    section_of: Callable[[str], Section]
    quantized: Collection[str]
    config: Mapping[Section, dict[str, object]]


def default_section(name: str) -> Section:
    """The section of a Hugging Face name, for families whose MTP layers have recognizable names."""
    return "draft" if name.startswith(("mtp.", "drafter.")) or ".mtp_layers." in name or ".mtp." in name else "target"


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


class Packer:
    """Plans buckets and packs exports into them. `next_sections`: the sections of the next version, by default all."""

    def __init__(self, **options: Unpack[PackingOptions]) -> None:
        self.bucket_bytes = options["bucket_bytes"]
        self.sections = self.next_sections = tuple(options.get("sections", ("target", "draft")))
        self.section_of = cache(options.get("section_of", default_section))
        self.quantized = frozenset(options.get("quantized", ()))
        self.config = dict(options.get("config") or {})
        self.plans: dict[Section, tuple[Bucket, ...]] = {}
        self._finite = FiniteChecks()

    def plan(self, specs: Iterable[TensorSpec], aliases: Mapping[str, str] | None = None) -> None:
        """Plan the buckets of all versions. `aliases` maps names of tied weights to the name under which they are sent."""
        by_section: dict[Section, list[TensorSpec]] = {section: [] for section in self.sections}
        for spec in specs:
            if (section := self.section_of(spec.name)) in by_section:
                by_section[section].append(spec)
        for section, section_specs in by_section.items():
            names = {spec.name for spec in section_specs}
            tied = {alias: owner for alias, owner in (aliases or {}).items() if owner in names}
            if section_specs:
                self.plans[section] = tuple(plan_buckets(section_specs, self.bucket_bytes, tied))

    def plan_from(self, export: Export, aliases: Mapping[str, str] | None = None, *, checksums: bool = False) -> Checksums:
        """Iterate over an export, and plan from it unless there is a plan. With `checksums`, compute and return them."""
        specs: list[TensorSpec] = []
        sums: Checksums = {section: {} for section in self.next_sections}
        for name, tensor in self.wire_tensors(export):
            specs.append(spec_of(name, tensor))
            if checksums:
                sums[self.section_of(name)][name] = checksum(tensor)
        self._finite.check()
        if not self.plans:
            self.plan(specs, aliases)
        return sums

    def wire_tensors(self, export: Export) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the sections in `next_sections`, in the same order. Those that are sent in FP8 are quantized, many at a time.

        Call `_finite.check` before the last bucket of a section is sent.
        """
        self._finite.clear()
        pending: list[tuple[str, torch.Tensor]] = []
        pending_bytes = 0
        for name, tensor in export:
            if self.section_of(name) not in self.next_sections:
                continue
            pending.append((name, tensor))
            pending_bytes += tensor.nbytes
            if pending_bytes >= QUANTIZED_BYTES or (len(pending) == 1 and name not in self.quantized):
                yield from self._quantized(pending)
                pending, pending_bytes = [], 0
        yield from self._quantized(pending)

    def _quantized(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors. A tensor that is sent in FP8 is yielded as its values, then its scales."""
        matrices = iter(quantize_all([tensor for name, tensor in tensors if name in self.quantized]))
        for name, tensor in tensors:
            if name not in self.quantized:
                yield name, tensor
                continue
            values, scales = next(matrices)
            self._finite.add(name, scales)
            yield name, values
            yield name + SCALE_SUFFIX, scales

    @property
    def next_plans(self) -> dict[Section, tuple[Bucket, ...]]:
        """The buckets for sending each section in `next_sections` in full, not as a delta."""
        return {section: buckets for section, buckets in self.plans.items() if section in self.next_sections}

    @property
    def full_nbytes(self) -> int:
        """Bytes of the sections in `next_sections`, sent in full."""
        return sum(bucket.nbytes for buckets in self.next_plans.values() for bucket in buckets)

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket of any version, complete or delta, rounded up to `ALIGNMENT` so that adjacent buffers are aligned."""
        nbytes = max([1, *(bucket.nbytes for buckets in self.plans.values() for bucket in buckets)])
        return -(-nbytes // ALIGNMENT) * ALIGNMENT

    def section_plans(self, sums: Checksums, changes: Changes | None = None, *, delta: bool = False) -> dict[Section, SectionPlan]:
        """Build the plans of the sections in `next_sections`, with checksums and numbers of changes; `delta`: send only the changes."""
        plans = {}
        for section, buckets in self.next_plans.items():
            plan = SectionPlan(buckets, sums.get(section, {}), self.config.get(section, {}))
            if changes is not None:
                plan = replace(plan, num_changed=changes.num_changed(section))
            if changes is not None and delta:
                blobs = [spec_of(name, blob) for name, blob in changes.blobs[section].items()]
                plan = replace(
                    plan, delta=Delta(tuple(plan_buckets(blobs, min(self.bucket_bytes, self.largest))), changes.changes[section])
                )
            plans[section] = plan
        return plans

    def compare(self, export: Export, copy: HostCopy, base: int, *, update: bool, checksums: bool) -> tuple[Changes, Checksums]:
        """Compare `export`, from `wire_tensors`, with version `base` in `copy`. Returns the changes, and the checksums if requested.

        With `update`, the copy is updated to the new version. Raises PlanMismatch if the export differs from the plan.
        """
        plans = self.next_plans
        comparison = Comparison(copy, base, plans, limit=MAX_DELTA_SHARE * self.full_nbytes, update=update)
        sums: Checksums = {section: {} for section in plans}
        for name, tensor in export:
            section = self.section_of(name)
            comparison.add(section, name, tensor)
            if checksums:
                sums[section][name] = checksum(tensor)
        self._finite.check()
        return comparison.finish(), sums

    @torch.no_grad()
    def pack_blobs(self, version: int, changes: Changes, plans: Mapping[Section, SectionPlan], writer: BucketWriter) -> None:
        """Fill the writer's buffers with blobs, in the buckets that `section_plans` has planned for these changes."""
        for section, plan in plans.items():
            writer.begin(version, section)
            packer = _SectionPacker(section, plan.wire_buckets)
            for name, blob in changes.blobs[section].items():
                packer.add(spec_of(name, blob), blob, writer)
            packer.check_ended()

    @torch.no_grad()
    def pack(self, version: int, tensors: Export, writer: BucketWriter, *, checksums: bool = False) -> Checksums:
        """Fill the writer's buffers in the plan's order while the export streams.

        Tensors of two sections may be interleaved, unless the writer requires `sequential_sections`. Raises PlanMismatch if the export
        differs from the plan, SyncError if the writer cannot send its sections in this order, and RuntimeFailure if a quantized matrix is
        not finite.
        """
        packers = {section: _SectionPacker(section, buckets, self._finite.check) for section, buckets in self.next_plans.items()}
        sums: Checksums = {section: {} for section in packers}
        for name, tensor in tensors:
            section = self.section_of(name)
            if section not in packers:
                raise PlanMismatch(f"{name}: section {section} is not in the plan")
            packer = packers[section]
            if name not in packer.aliases:
                if not packer.has_started:
                    expected = next(other for other, packer in packers.items() if not packer.has_ended)
                    if writer.sequential_sections and section != expected:
                        raise SyncError(f"the export began section {section} before section {expected} had ended")
                    writer.begin(version, section)
                packer.add(spec_of(name, tensor), tensor, writer)
            if checksums:
                sums[section][name] = checksum(tensor)
        for packer in packers.values():
            packer.check_ended()
        return sums


class _SectionPacker:
    """Copies the tensors of one section into its buckets.

    `check` is called before the last bucket is sent, so receivers never complete a section that fails it. It waits for the GPU, so it is
    not called for every bucket.
    """

    def __init__(self, section: str, buckets: Sequence[Bucket], check: Callable[[], None] = lambda: None) -> None:
        self.section = section
        self.check = check
        self.aliases = {alias for bucket in buckets for entry in bucket.entries for alias in entry.aliases}
        self.entries = [(bucket, entry) for bucket in buckets for entry in bucket.entries]
        self.next = 0
        self.buffer: torch.Tensor | None = None
        self._entry_words: Iterator[torch.Tensor] = iter(())  # of the bucket's remaining entries
        # Pending copies: destinations and sources as words.
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self._pending_bytes = 0

    @property
    def has_started(self) -> bool:
        return self.next > 0

    @property
    def has_ended(self) -> bool:
        return self.next == len(self.entries)

    def add(self, spec: TensorSpec, tensor: torch.Tensor, writer: BucketWriter) -> None:
        """Copy one tensor, which may span several buckets. A bucket is sent once its last entry is copied.

        The tensor must not change until its last bucket is sent.
        """
        data = tensor.contiguous().view(-1)
        while True:
            bucket, entry = self._next_entry(spec)
            if self.buffer is None:
                self.buffer = writer.buffer(self.section, bucket)
                self._entry_words = iter(_words_of_entries(self.buffer, bucket))
            piece = data if entry.is_whole else data[entry.part_start : entry.part_stop]
            self._copy(piece, entry, self.buffer, writer)
            self.next += 1
            if entry is bucket.entries[-1]:
                self._start_copies(writer)
                if self.has_ended:
                    self.check()
                writer.send(self.section, bucket)
                self.buffer = None
            if entry.is_last:
                return

    def _copy(self, piece: torch.Tensor, entry: Entry, buffer: torch.Tensor, writer: BucketWriter) -> None:
        """Copy elements to their entry of the buffer. Copies of whole words are only collected, and `_start_copies` starts them together.

        One call for each tensor would take the host longer than a bucket is on the wire.
        """
        words = next(self._entry_words)
        if not is_word_aligned(piece):
            target = buffer[entry.offset : entry.offset + entry.nbytes]
            target.copy_(piece.view(torch.uint8), non_blocking=writer.stream_ordered)
            return
        self._targets.append(words)
        self._sources.append(piece.view(torch.int64))
        self._pending_bytes += entry.nbytes
        if self._pending_bytes >= MAX_PENDING_BYTES:
            self._start_copies(writer)

    def _start_copies(self, writer: BucketWriter) -> None:
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources, non_blocking=writer.stream_ordered)
        self._targets, self._sources, self._pending_bytes = [], [], 0

    def _next_entry(self, spec: TensorSpec) -> tuple[Bucket, Entry]:
        if self.has_ended:
            raise PlanMismatch(f"{spec.name}: not in the plan of section {self.section}, which has ended")
        bucket, entry = self.entries[self.next]
        if (entry.name, entry.shape, entry.dtype) != (spec.name, spec.shape, spec.dtype):
            planned = f"{entry.name} {entry.shape} {entry.dtype}"
            raise PlanMismatch(f"{spec.name} {spec.shape} {spec.dtype}: the plan of section {self.section} has {planned} here")
        return bucket, entry

    def check_ended(self) -> None:
        """Raise PlanMismatch with the names of the missing tensors, if there are any."""
        if not self.has_ended:
            missing = sorted({entry.name for _, entry in self.entries[self.next :]})
            raise PlanMismatch(f"the export ended without {', '.join(missing)}")


def _words_of_entries(buffer: torch.Tensor, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    """The whole words of each entry in the bucket's buffer, in one operation."""
    sizes, end = [], 0
    for entry in bucket.entries:
        start = entry.offset // WORD_BYTES
        sizes += [start - end, entry.nbytes // WORD_BYTES]
        end = start + sizes[-1]
    words = as_words(buffer)
    return words.split_with_sizes([*sizes, len(words) - end])[1::2]
