"""Buckets: how the tensors of a weight update are laid out in bounded, contiguous pieces.

The plan is a function of names, shapes and dtypes alone, so both ends of a transport compute the same one from the same
list. Tensors keep their order. A tensor that fits a bucket is never split; a larger one starts a bucket of its own, runs
through as many as it needs, and the next tensor follows behind its last part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import aliases, section_of, tensor_shapes
from mtpctl.recipe.model import DTYPES

if TYPE_CHECKING:
    from mtpctl.recipe.schema import Recipe

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


ADAPTER_PREFIX = "base_model.model."
"""PEFT's prefix of the names of layers that it adapts."""

ADAPTED = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q_proj": ("q_proj",),
    "linear_q_down_proj": ("q_a_proj",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",),
    "linear_proj": ("o_proj",),
    "in_proj": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba"),
    "out_proj": ("out_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""The layers of a Hugging Face folder that make up each Megatron layer of `train.lora.targets`, over all families."""


def wire_tensors(shape: ModelShape, section: str, dtype: str) -> list[TensorSpec]:
    """Tensors of `target` or `draft` under their Hugging Face names, all in `dtype`. Aliases are left to the receiver."""
    same = aliases(shape)
    return [
        TensorSpec(name, size, dtype)
        for name, size in tensor_shapes(shape).items()
        if name not in same and section_of(name, shape) == section
    ]


def adapted_weights(shape: ModelShape, targets: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Weights `[rows, columns]` of every layer of the trunk that `train.lora.targets` name."""
    leaves = {leaf for target in targets for leaf in ADAPTED[target]}
    return {
        name: size
        for name, size in tensor_shapes(shape).items()
        if name.endswith(".weight") and name.split(".")[-2] in leaves and section_of(name, shape) == "target"
    }


def adapter_tensors(shape: ModelShape, rank: int, targets: Sequence[str], dtype: str) -> list[TensorSpec]:
    """A `[rank, columns]` and B `[rows, rank]`, by PEFT's names, of every layer of the trunk that `targets` name."""
    found = []
    for name, (rows, columns) in adapted_weights(shape, targets).items():
        layer = ADAPTER_PREFIX + name.removesuffix(".weight")
        found.append(TensorSpec(f"{layer}.lora_A.weight", (rank, columns), dtype))
        found.append(TensorSpec(f"{layer}.lora_B.weight", (rows, rank), dtype))
    return found


def _dtype(recipe: Recipe) -> str:
    return DTYPES[recipe.train.precision if recipe.rollout.dtype == "auto" else recipe.rollout.dtype]


def base_weight_bytes(recipe: Recipe, shape: ModelShape) -> int:
    """Bytes of the base weights, which the first sync sends with an adapter; 0 where no adapter is synced."""
    return sum(spec.nbytes for spec in wire_tensors(shape, "target", _dtype(recipe))) if "adapter" in recipe.sync.sections else 0


def section_buckets(recipe: Recipe, shape: ModelShape) -> dict[str, list[Bucket]]:
    """Buckets of each section that the recipe syncs; no draft where the MTP layers are off."""
    lora, dtype = recipe.train.lora, _dtype(recipe)
    found: dict[str, list[TensorSpec]] = {}
    for section in recipe.sync.sections:
        if section == "adapter" and lora is not None:
            found[section] = adapter_tensors(shape, lora.rank, lora.targets, dtype)
        elif section == "target" or (shape.mtp_layers and recipe.mtp.mode != "off"):
            found[section] = wire_tensors(shape, section, dtype)
    return {section: plan_buckets(specs, recipe.sync.bucket_bytes) for section, specs in found.items()}
