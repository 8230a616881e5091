"""Buckets: how the tensors of a weight update are laid out in bounded, contiguous pieces.

The plan is a function of names, shapes and dtypes alone, so both ends of a transport compute the same one from the same
list. Tensors keep their order. A tensor that fits a bucket is never split; a larger one starts a bucket of its own, runs
through as many as it needs, and the next tensor follows behind its last part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

ALIGNMENT = 256
"""Bytes. Every entry starts at a multiple, so that a bucket can be viewed as any dtype and copied in wide words."""

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element, by torch's dtype name without `torch.`."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be moved: its wire name, full shape, and dtype as a key of `DTYPE_BYTES`."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Elements; 1 for a scalar."""
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element. Raises ValueError for a dtype that is not in `DTYPE_BYTES`."""
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"{self.name}: dtype {self.dtype!r} is unknown; known are {', '.join(DTYPE_BYTES)}")
        return DTYPE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor, or a part of one, at its place in a bucket.

    `offset` and `nbytes` are bytes in the bucket. `part_start` and `part_stop` are elements of the flattened tensor of shape
    `shape`; a whole tensor has 0 and its element count. `aliases` are further names of the same tensor (tied weights), which
    take no bytes of their own.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int
    part_start: int
    part_stop: int
    aliases: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether the entry holds all of its tensor."""
        return self.part_start == 0 and self.last

    @property
    def last(self) -> bool:
        """Whether the tensor is complete once this entry has arrived."""
        return self.part_stop == prod(self.shape)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Entries that travel together in one buffer of `nbytes` bytes, in the order of their offsets."""

    index: int
    entries: tuple[Entry, ...]

    @property
    def nbytes(self) -> int:
        """Bytes up to the end of the last entry: what must be sent."""
        return self.entries[-1].offset + self.entries[-1].nbytes


@dataclass(slots=True)
class _BucketBuilder:
    """Fills one bucket after another; `closed` are those that are full."""

    closed: list[Bucket] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    end: int = 0

    @property
    def start(self) -> int:
        """Where the next entry would begin."""
        return -(-self.end // ALIGNMENT) * ALIGNMENT

    def add(self, spec: TensorSpec, aliases: tuple[str, ...], start: int, stop: int) -> None:
        nbytes = (stop - start) * spec.itemsize
        self.entries.append(Entry(spec.name, spec.shape, spec.dtype, self.start, nbytes, start, stop, aliases))
        self.end = self.entries[-1].offset + nbytes

    def close(self) -> None:
        if self.entries:
            self.closed.append(Bucket(len(self.closed), tuple(self.entries)))
        self.entries, self.end = [], 0


def plan_buckets(tensors: Iterable[TensorSpec], bucket_bytes: int, aliases: Mapping[str, str] | None = None) -> list[Bucket]:
    """Lay out `tensors` in buckets of at most `bucket_bytes` bytes, in order, each tensor exactly once.

    `aliases` maps a name to the name that it shares its tensor with. An alias may or may not be among `tensors`; either way
    it is listed on the entries of the tensor it stands for and moves no bytes.

    Raises ValueError for a name given twice, an alias of an unknown tensor or of itself or with another shape or dtype, an
    unknown dtype, and a `bucket_bytes` under `ALIGNMENT`.
    """
    if bucket_bytes < ALIGNMENT:
        raise ValueError(f"a bucket needs at least {ALIGNMENT} bytes, got {bucket_bytes}")
    specs: dict[str, TensorSpec] = {}
    for spec in tensors:
        if spec.name in specs:
            raise ValueError(f"tensor {spec.name!r} is listed twice")
        specs[spec.name] = spec
    names_of = _alias_groups(specs, aliases or {})
    builder = _BucketBuilder()
    for spec in specs.values():
        if spec.name not in names_of:
            continue
        also = names_of[spec.name]
        if builder.entries and builder.start + spec.nbytes > bucket_bytes:
            builder.close()
        if spec.nbytes <= bucket_bytes:
            builder.add(spec, also, 0, spec.numel)
            continue
        step = bucket_bytes // ALIGNMENT * ALIGNMENT // spec.itemsize
        for start in range(0, spec.numel, step):
            builder.close()
            builder.add(spec, also, start, min(start + step, spec.numel))
    builder.close()
    return builder.closed


def _alias_groups(specs: Mapping[str, TensorSpec], aliases: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Names that own their bytes, each with its aliases."""
    groups: dict[str, list[str]] = {name: [] for name in specs if name not in aliases}
    for alias in aliases:
        owner, seen = alias, {alias}
        while owner in aliases:
            owner = aliases[owner]
            if owner in seen:
                raise ValueError(f"alias {alias!r} leads back to itself")
            seen.add(owner)
        if owner not in specs:
            raise ValueError(f"alias {alias!r} stands for {owner!r}, which is not among the tensors")
        if alias in specs and (specs[alias].shape, specs[alias].dtype) != (specs[owner].shape, specs[owner].dtype):
            raise ValueError(f"alias {alias!r} has another shape or dtype than {owner!r}")
        groups[owner].append(alias)
    return {name: tuple(also) for name, also in groups.items()}
