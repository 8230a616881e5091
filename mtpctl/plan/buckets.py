"""The tensors of a weight update, and their layout in buckets of bounded size.

The plan depends only on names, shapes and dtypes, so both ends of a transport compute the same plan. Tensors keep their order. A tensor
that fits a bucket is never split. A larger tensor starts a new bucket and spans several; the next tensor follows its last part.

With `sync.delta` only changed elements are sent, and unchanged tensors are not sent at all. `mtpctl.sync.delta` encodes a changed tensor as
a blob, in the layout that is smallest for the number of changed elements. Integers are little-endian, and `values` starts at a multiple of
8 bytes:

    whole      every element
    bitmap     bit `i % 8` of byte `i // 8` is set if element `i` changed │ values of the changed elements
    offsets    per block of 65,536 elements: int32 number of changed elements │ uint16 position of each in its block │ values

With 1% of the elements changed, `offsets` has 2% of a bf16 tensor's bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Literal

from mtpctl.families.quantization import SCALE_SUFFIX, list_unquantized_modules, scale_shape
from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import aliases, section_of, tensor_shapes
from mtpctl.recipe.model import DTYPES
from mtpctl.recipe.numerics import sends_unquantized_too, sent_in_fp8
from mtpctl.recipe.sync import PUSH_TRANSPORTS, changes_every_element

if TYPE_CHECKING:
    from mtpctl.recipe.schema import Recipe

ALIGNMENT = 256
"""Alignment of entries in bytes, so that a bucket can be viewed as any dtype and copied in wide words."""

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
"""Bytes of an element, by torch's dtype name without `torch.`."""

ADAPTER_PREFIX = "base_model.model."
"""PEFT's prefix for the names of adapted layers."""

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
"""The Hugging Face layers that make up each Megatron layer of `train.lora.targets`, over all families."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to send: its wire name, full shape, and dtype as a key of `DTYPE_BYTES`."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
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
    """A tensor, or a part of one, in a bucket.

    `offset` and `nbytes` are bytes in the bucket. `part_start` and `part_stop` are element indices of the flattened tensor, which has shape
    `shape`. `aliases` are other names of the same tensor (tied weights), which are not sent again.
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
    def is_whole(self) -> bool:
        """Whether the entry is a complete tensor."""
        return self.part_start == 0 and self.is_last

    @property
    def is_last(self) -> bool:
        """Whether this entry completes the tensor."""
        return self.part_stop == prod(self.shape)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Entries that are sent together in one buffer of `nbytes` bytes, in the order of their offsets."""

    index: int
    entries: tuple[Entry, ...]

    @property
    def nbytes(self) -> int:
        """Bytes up to the end of the last entry."""
        return self.entries[-1].offset + self.entries[-1].nbytes


@dataclass(slots=True)
class _BucketBuilder:
    """Fills one bucket after another. buckets: the completed buckets."""

    buckets: list[Bucket] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    end: int = 0

    @property
    def start(self) -> int:
        """Offset of the next entry."""
        return -(-self.end // ALIGNMENT) * ALIGNMENT

    def add(self, spec: TensorSpec, aliases: tuple[str, ...], start: int, stop: int) -> None:
        nbytes = (stop - start) * spec.itemsize
        self.entries.append(Entry(spec.name, spec.shape, spec.dtype, self.start, nbytes, start, stop, aliases))
        self.end = self.entries[-1].offset + nbytes

    def close(self) -> None:
        if self.entries:
            self.buckets.append(Bucket(len(self.buckets), tuple(self.entries)))
        self.entries, self.end = [], 0


def plan_buckets(tensors: Iterable[TensorSpec], bucket_bytes: int, aliases: Mapping[str, str] | None = None) -> list[Bucket]:
    """Lay out `tensors` in order in buckets of at most `bucket_bytes` bytes, each tensor once.

    `aliases` maps a name to another name of the same tensor. An alias is listed in that tensor's entries and is not sent, whether or not it
    is among `tensors`.

    Raises ValueError for a duplicate name, an unknown dtype, a `bucket_bytes` under `ALIGNMENT`, and an alias that refers to itself, to an
    unknown tensor, or to one with another shape or dtype.
    """
    if bucket_bytes < ALIGNMENT:
        raise ValueError(f"a bucket needs at least {ALIGNMENT} bytes, got {bucket_bytes}")
    specs: dict[str, TensorSpec] = {}
    for spec in tensors:
        if spec.name in specs:
            raise ValueError(f"tensor {spec.name!r} is listed twice")
        specs[spec.name] = spec
    aliases_of = _alias_groups(specs, aliases or {})
    builder = _BucketBuilder()
    for spec in specs.values():
        if spec.name not in aliases_of:  # it is an alias itself
            continue
        entry_aliases = aliases_of[spec.name]
        if builder.entries and builder.start + spec.nbytes > bucket_bytes:
            builder.close()
        if spec.nbytes <= bucket_bytes:
            builder.add(spec, entry_aliases, 0, spec.numel)
            continue
        step = bucket_bytes // ALIGNMENT * ALIGNMENT // spec.itemsize
        for start in range(0, spec.numel, step):
            builder.close()
            builder.add(spec, entry_aliases, start, min(start + step, spec.numel))
    builder.close()
    return builder.buckets


def _alias_groups(specs: Mapping[str, TensorSpec], aliases: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The names to send, each with its aliases."""
    groups: dict[str, list[str]] = {name: [] for name in specs if name not in aliases}
    for alias in aliases:
        owner, chain = alias, {alias}
        while owner in aliases:
            owner = aliases[owner]
            if owner in chain:
                raise ValueError(f"alias {alias!r} leads back to itself")
            chain.add(owner)
        if owner not in specs:
            raise ValueError(f"alias {alias!r} stands for {owner!r}, which is not among the tensors")
        if alias in specs and (specs[alias].shape, specs[alias].dtype) != (specs[owner].shape, specs[owner].dtype):
            raise ValueError(f"alias {alias!r} has another shape or dtype than {owner!r}")
        groups[owner].append(alias)
    return {name: tuple(names) for name, names in groups.items()}


def wire_tensors(shape: ModelShape, section: str, dtype: str, quantized: Collection[str] = ()) -> list[TensorSpec]:
    """Tensors of `target` or `draft` with their Hugging Face names, without aliases.

    Those named in `quantized` are in FP8, with scales. The others are in `dtype`.
    """
    alias_names, specs = aliases(shape), []
    for name, tensor_shape in tensor_shapes(shape).items():
        if name in alias_names or section_of(name, shape) != section:
            continue
        if name not in quantized:
            specs.append(TensorSpec(name, tensor_shape, dtype))
            continue
        specs.append(TensorSpec(name, tensor_shape, "float8_e4m3fn"))
        specs.append(TensorSpec(name + SCALE_SUFFIX, scale_shape(*tensor_shape), "float32"))
    return specs


def adapted_weights(shape: ModelShape, targets: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Names and shapes `[rows, columns]` of the weights of every trunk layer in `targets` (see `train.lora.targets`)."""
    leaves = {leaf for target in targets for leaf in ADAPTED[target]}
    return {
        name: size
        for name, size in tensor_shapes(shape).items()
        if name.endswith(".weight") and name.split(".")[-2] in leaves and section_of(name, shape) == "target"
    }


def adapter_tensors(shape: ModelShape, rank: int, targets: Sequence[str], dtype: str) -> list[TensorSpec]:
    """A `[rank, columns]` and B `[rows, rank]`, with PEFT's names, of every trunk layer in `targets`."""
    specs = []
    for name, (rows, columns) in adapted_weights(shape, targets).items():
        layer = ADAPTER_PREFIX + name.removesuffix(".weight")
        specs.append(TensorSpec(f"{layer}.lora_A.weight", (rank, columns), dtype))
        specs.append(TensorSpec(f"{layer}.lora_B.weight", (rows, rank), dtype))
    return specs


def _dtype(recipe: Recipe) -> str:
    return DTYPES[recipe.sent_precision]


def base_weight_bytes(recipe: Recipe, shape: ModelShape) -> int:
    """Bytes of the base weights, which the first sync sends in addition to the adapter; 0 if no adapter is synced."""
    return sum(spec.nbytes for spec in wire_tensors(shape, "target", _dtype(recipe))) if "adapter" in recipe.sync.sections else 0


def section_buckets(recipe: Recipe, shape: ModelShape) -> dict[str, list[Bucket]]:
    """Buckets of each section that the recipe syncs; no draft section if MTP is off."""
    lora, dtype, quantized = recipe.train.lora, _dtype(recipe), sent_in_fp8(recipe, shape)
    sections: dict[str, list[TensorSpec]] = {}
    for section in recipe.sync.sections:
        if section == "adapter" and lora is not None:
            sections[section] = adapter_tensors(shape, lora.rank, lora.targets, dtype)
        elif section == "target" or (shape.mtp_layers and recipe.mtp.mode != "off"):
            sections[section] = wire_tensors(shape, section, dtype, quantized)
    return {section: plan_buckets(specs, recipe.sync.bucket_bytes) for section, specs in sections.items()}


Layout = Literal["whole", "bitmap", "offsets"]

BLOCK = 1 << 16
"""Elements of a block of `offsets`: a position in it fits 16 bits."""
EXPECTED_CHANGED_SHARE = 0.01
"""Share of bf16 elements that an RL update changes at usual learning rates, for plans. In fp32 it is 1."""
MAX_DELTA_SHARE = 0.5
"""Share of the full size above which a version is sent in full."""


@dataclass(frozen=True, slots=True)
class Change:
    """How a changed tensor of `numel` elements is sent: the layout of its blob, and the number of changed elements."""

    layout: Layout
    num_changed: int
    numel: int

    @property
    def values_start(self) -> int:
        if self.layout == "whole":
            return 0
        positions = -(-self.numel // 8) if self.layout == "bitmap" else 4 * -(-self.numel // BLOCK) + 2 * self.num_changed
        return -(-positions // 8) * 8

    def nbytes(self, itemsize: int) -> int:
        """Bytes of the blob of a tensor with elements of `itemsize` bytes."""
        return self.values_start + itemsize * (self.numel if self.layout == "whole" else self.num_changed)


def smallest_change(num_changed: int, numel: int, itemsize: int) -> Change:
    layouts: tuple[Layout, ...] = ("whole", "bitmap", "offsets")
    return min((Change(layout, num_changed, numel) for layout in layouts), key=lambda change: change.nbytes(itemsize))


@dataclass(frozen=True, slots=True)
class DeltaPlan:
    """Planned sizes of syncs with `sync.delta`.

    nbytes: bytes of a sync in which `share` of every tensor's elements changed; the full size if they exceed `MAX_DELTA_SHARE` of it. copy:
    bytes of the copy of the last version that trainer rank 0 keeps in host memory because of `sync.delta`. It is 0 for transports that
    push, which always keep one for the version store.
    """

    share: float
    nbytes: int
    copy: int

    def line(self, format_size: Callable[[int], str]) -> str:
        """A sentence about the sizes. `format_size` formats bytes."""
        cause = "because all elements change in fp32" if self.share == 1 else f"if {self.share:.0%} of the elements change"
        copy = f"; trainer rank 0 keeps a copy of {format_size(self.copy)} in host memory" if self.copy else ""
        return f"later syncs send {format_size(self.nbytes)} {cause}{copy}"


def plan_delta(recipe: Recipe, sections: Mapping[str, Sequence[Bucket]]) -> DeltaPlan | None:
    """The planned sizes. sections: the buckets of a sync in full. None without `sync.delta`."""
    if not recipe.sync.delta:
        return None
    full_bytes = sum(bucket.nbytes for buckets in sections.values() for bucket in buckets)
    share = 1.0 if changes_every_element(recipe) else EXPECTED_CHANGED_SHARE
    changed_bytes = delta_bytes(sections, share)
    return DeltaPlan(
        share,
        changed_bytes if changed_bytes <= MAX_DELTA_SHARE * full_bytes else full_bytes,
        0 if recipe.sync.transport in PUSH_TRANSPORTS else full_bytes,
    )


def delta_bytes(sections: Mapping[str, Sequence[Bucket]], share: float) -> int:
    """Bytes of a sync that changes this share of every tensor's elements."""
    total = 0
    for entry in (entry for buckets in sections.values() for bucket in buckets for entry in bucket.entries if entry.part_start == 0):
        numel = prod(entry.shape)
        total += smallest_change(round(share * numel), numel, DTYPE_BYTES[entry.dtype]).nbytes(DTYPE_BYTES[entry.dtype])
    return total


@dataclass(frozen=True, slots=True)
class QuantizationPlan:
    """The weights of engines with `rollout.quantization`.

    Attributes:
        matrices: number of quantized matrices.
        bytes: their values and scales.
        bytes_before: their size unquantized.
        unquantized: kinds of matrices that are not quantized, in addition to embeddings, norms and biases.
        bytes_to_logprob: unquantized weights that each sync sends to the log-prob server as well.
    """

    matrices: int
    bytes: int
    bytes_before: int
    unquantized: tuple[str, ...]
    bytes_to_logprob: int

    def lines(self, format_size: Callable[[int], str]) -> list[str]:
        """The plan as text. `format_size` formats bytes."""
        unquantized = ", ".join(("embeddings", "norms", "biases", *self.unquantized))
        lines = [
            f"fp8: {self.matrices} matrices, {format_size(self.bytes)} instead of {format_size(self.bytes_before)}; in bf16: {unquantized}"
        ]
        if self.bytes_to_logprob:
            lines.append(f"the log-prob server gets {format_size(self.bytes_to_logprob)} of unquantized weights at each sync")
        return lines


def plan_quantization(recipe: Recipe, shape: ModelShape) -> QuantizationPlan | None:
    """The plan of the recipe's quantization; None without one."""
    names = sent_in_fp8(recipe, shape)
    if not names:
        return None
    sizes, dtype = tensor_shapes(shape), DTYPES[recipe.sent_precision]
    sections = section_buckets(recipe, shape)
    unquantized_specs = [spec for section in sections for spec in wire_tensors(shape, section, dtype)]
    names &= {spec.name for spec in unquantized_specs}
    specs = [spec for section in sections for spec in wire_tensors(shape, section, dtype, names)]
    quantized_bytes = sum(spec.nbytes for spec in specs if spec.name.removesuffix(SCALE_SUFFIX) in names)
    modules = dict.fromkeys(module.rpartition(".")[2] for module in list_unquantized_modules(shape, quantized=names))
    return QuantizationPlan(
        matrices=len(names),
        bytes=quantized_bytes,
        bytes_before=sum(prod(sizes[name]) for name in names) * DTYPE_BYTES[dtype],
        unquantized=tuple(modules),
        bytes_to_logprob=sum(spec.nbytes for spec in unquantized_specs) if sends_unquantized_too(recipe) else 0,
    )
