"""Matches tensors on the wire to the parameters of an engine's live model, and to the shards on this rank.

Tensors have Hugging Face names and full shapes on the wire. A live model packs some of them (`q_proj`, `k_proj` and `v_proj` in
`qkv_proj`, the experts of a layer in two tensors). It wraps layers that have an adapter (`.base_layer`), and renames layers by its own
rules. `resolve` maps a name to the live parameter, and `find_shard` finds the part of it on a rank of a tensor-parallel engine.
`match_shards` does both for a section and checks it, once per plan. Parts of a tensor that is split over buckets are written directly to
the shard.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol, cast

import torch
from torch import nn

from mtpctl.families.quantization import FP8_BLOCK, SCALE_SUFFIX
from mtpctl.plan.buckets import Bucket, Entry
from mtpctl.sync.checksums import PartialSums, partial_sums
from mtpctl.sync.protocol import PlanMismatch, SectionPlan

Renamer = Callable[[str], str | None]

PACKED: dict[str, tuple[str, tuple[int, ...]]] = {
    "q_proj": ("qkv_proj", (0,)),
    "k_proj": ("qkv_proj", (1,)),
    "v_proj": ("qkv_proj", (2,)),
    "gate_proj": ("gate_up_proj", (0,)),
    "up_proj": ("gate_up_proj", (1,)),
    "in_proj_qkv": ("in_proj_qkvz", (0, 1, 2)),
    "in_proj_z": ("in_proj_qkvz", (3,)),
    "in_proj_b": ("in_proj_ba", (0,)),
    "in_proj_a": ("in_proj_ba", (1,)),
    "q_a_proj": ("fused_qkv_a_proj", (0,)),
    "kv_a_proj_with_mqa": ("fused_qkv_a_proj", (1,)),
}
"""Maps a layer name on the wire to the live layer that packs it, and to the indices of its parts in the live layer."""

EXPERTS: dict[str, tuple[str, tuple[int, ...]]] = {"gate_proj": ("w13", (0,)), "up_proj": ("w13", (1,)), "down_proj": ("w2", (0,))}
"""Maps a layer of one expert on the wire to the live tensor of all experts, and to the indices of its parts within one expert."""

_EXPERT = re.compile(
    r"^(?P<layer>.*\.experts)\.(?P<expert>\d+)\.(?P<proj>gate_proj|up_proj|down_proj)\.(?P<leaf>weight|bias|weight_scale_inv)$"
)
_EXPERT_SUBMODULES = ("", ".routed_experts", ".base_layer", ".base_layer.routed_experts")
_BASE_LAYER = "base_layer"


@dataclass(frozen=True, slots=True)
class Slot:
    """The destination of a wire tensor: a live parameter, its packed parts (None: all of it), and its expert."""

    parameter: str
    parts: tuple[int, ...] | None = None
    expert: int | None = None


def resolve(name: str, live: Collection[str], rename: Renamer | None = None) -> Slot | None:
    """Find the slot of wire name `name` among the `live` parameter names, or None if there is none.

    `rename`: the live model's renaming rule. It is tried first, because the unchanged name may be that of another layer.
    """
    for candidate in _candidates(name, rename):
        for parameter in _wrapped_names(candidate.parameter):
            if parameter in live:
                return Slot(parameter, candidate.parts, candidate.expert)
    return None


def _candidates(name: str, rename: Renamer | None) -> Iterator[Slot]:
    renamed = rename(name) if rename else None
    # A drafter is a separate model. Its layer names begin with `model.` instead of the checkpoint's `mtp.`.
    drafter = f"model.{name.removeprefix('mtp.')}" if name.startswith("mtp.") else name
    for alternative in dict.fromkeys([renamed or name, name, drafter]):
        yield Slot(alternative)
        path = alternative.split(".")
        for index, layer in enumerate(path):
            if layer in PACKED:
                packed_layer, parts = PACKED[layer]
                yield Slot(".".join([*path[:index], packed_layer, *path[index + 1 :]]), parts)
        if match := _EXPERT.match(alternative):
            tensor, parts = EXPERTS[match["proj"]]
            for submodule in _EXPERT_SUBMODULES:
                yield Slot(f"{match['layer']}{submodule}.{tensor}_{match['leaf']}", parts, int(match["expert"]))


def _wrapped_names(name: str) -> Iterator[str]:
    """The name, and the same name with `.base_layer` before its last part, or without it if `name` has it there."""
    yield name
    layer, _, leaf = name.rpartition(".")
    if layer.endswith(f".{_BASE_LAYER}"):
        yield f"{layer.removesuffix(f'.{_BASE_LAYER}')}.{leaf}"
    elif layer:
        yield f"{layer}.{_BASE_LAYER}.{leaf}"


@dataclass(frozen=True, slots=True)
class Run:
    """A range of `length` indices of the split dimension, starting at `wire` in the full tensor and at `live` in the parameter."""

    wire: int
    live: int
    length: int


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a wire tensor that this rank stores in `live`: runs along dimension `dim`; no runs if all of it is on other ranks.

    `shape` and `dtype` are those of the wire tensor (None: the live dtype).
    """

    live: torch.Tensor
    shape: tuple[int, ...]
    dim: int
    runs: tuple[Run, ...]
    dtype: torch.dtype | None = None

    @property
    def outer(self) -> int:
        """Product of the sizes of the dimensions before `dim`."""
        return prod(self.shape[: self.dim])

    @property
    def columns(self) -> int:
        """Product of the sizes of `dim` and the dimensions after it."""
        return prod(self.shape[self.dim :])

    def blocks(self) -> list[tuple[int, torch.Tensor]]:
        """First column and view of the live memory `[outer, columns of the run]`, for each run."""
        inner = prod(self.shape[self.dim + 1 :])
        matrix = self.live.view(self.outer, -1)
        return [(run.wire * inner, matrix[:, run.live * inner : (run.live + run.length) * inner]) for run in self.runs]

    def contiguous_parts(self) -> list[tuple[int, torch.Tensor]] | None:
        """For each run, the index of its first element in the flattened wire tensor, and a flat view of its live memory.

        None unless every run is contiguous in the wire tensor and in live memory.
        """
        blocks = self.blocks()
        if self.outer == 1:
            return [(column, block[0]) for column, block in blocks]
        if len(blocks) == 1 and blocks[0][1].shape[1] == self.columns and blocks[0][1].is_contiguous():
            return [(0, blocks[0][1].view(-1))]
        return None

    def write(self, piece: torch.Tensor, start: int, stop: int) -> None:
        """Copy elements `[start, stop)` of the flattened wire tensor to the live parameter, except those of other ranks."""
        width = self.columns
        first_row, end_row = -(-start // width), stop // width
        partial_rows = [(start, stop)] if first_row > end_row else [(start, first_row * width), (end_row * width, stop)]
        for column, block in self.blocks():
            end = column + block.shape[1]
            if first_row < end_row:
                block[first_row:end_row].copy_(piece[first_row * width - start : end_row * width - start].view(-1, width)[:, column:end])
            for low, high in partial_rows:
                row = low // width
                low, high = max(low, row * width + column), min(high, row * width + end)
                if low < high:
                    block[row, low - row * width - column : high - row * width - column].copy_(piece[low - start : high - start])

    def write_at(self, positions: torch.Tensor, values: torch.Tensor) -> None:
        """Write `values` at these positions of the flattened wire tensor, except those of other ranks."""
        for column, block in self.blocks():
            indices, local_values, width = positions, values, block.shape[1]
            if width != self.columns:
                columns = positions % self.columns - column
                local = ((columns >= 0) & (columns < width)).nonzero().view(-1)
                indices = positions[local] // self.columns * width + columns[local]
                local_values = values[local]
            if block.is_contiguous():
                block.view(-1)[indices] = local_values.to(block.dtype)
            else:
                block[indices // width, indices % width] = local_values.to(block.dtype)

    def sums(self) -> list[PartialSums]:
        """This rank's contribution to the tensor's checksum."""
        numel = prod(self.shape)
        return [partial_sums(block.to(self.dtype or block.dtype), numel, self.columns, column) for column, block in self.blocks()]


WORD_BYTES = 8
"""Size of a word, the unit of batched copies."""


def as_words(data: torch.Tensor) -> torch.Tensor:
    """The whole words of a buffer of bytes (uint8)."""
    return data[: data.numel() // WORD_BYTES * WORD_BYTES].view(torch.int64)


def is_word_aligned(flat: torch.Tensor) -> bool:
    """Whether a contiguous vector can be viewed as words."""
    offset = flat.storage_offset() * flat.element_size()
    return not (flat.nbytes % WORD_BYTES or offset % WORD_BYTES or flat.data_ptr() % WORD_BYTES)


def entry_view(entry: Entry, data: torch.Tensor) -> torch.Tensor:
    """The flattened elements of an entry in the bytes of its bucket."""
    return data[entry.offset : entry.offset + entry.nbytes].view(getattr(torch, entry.dtype))


@dataclass(frozen=True)
class BucketCopies:
    """The copies of one bucket into live parameters.

    targets: flat views of live memory as 64-bit words. source_slices: the words of the bucket that fill each of them. other_entries:
    entries that are not whole words, that are strided in a parameter, or whose parameter has another dtype.
    """

    targets: list[torch.Tensor]
    source_slices: list[slice]
    other_entries: list[Entry]


class LiveSection:
    """Writes the buckets of a plan into the shards of a live model (see `match_shards`).

    A bucket may have hundreds of tensors. To start one copy after another would take the host longer than the transfer of the bucket, so
    the copies of a bucket are prepared at the first update, and then started in one call.
    """

    def __init__(self, shards: dict[str, Shard]) -> None:
        self.shards = shards
        self._copies: dict[int, BucketCopies] = {}

    def write(self, bucket: Bucket, data: torch.Tensor) -> None:
        """Write a bucket's bytes `data [nbytes]` (uint8)."""
        copies = self._copies.get(bucket.index)
        if copies is None:
            copies = self._copies[bucket.index] = self._prepare(bucket)
        if copies.targets:
            words = as_words(data)
            torch._foreach_copy_(copies.targets, [words[source_slice] for source_slice in copies.source_slices])
        for entry in copies.other_entries:
            self.shards[entry.name].write(entry_view(entry, data), entry.part_start, entry.part_stop)

    def _prepare(self, bucket: Bucket) -> BucketCopies:
        copies = BucketCopies([], [], [])
        for entry in bucket.entries:
            word_copies = self._word_copies(entry)
            if word_copies is None:
                copies.other_entries.append(entry)
                continue
            for target, source_slice in word_copies:
                copies.targets.append(target)
                copies.source_slices.append(source_slice)
        return copies

    def _word_copies(self, entry: Entry) -> list[tuple[torch.Tensor, slice]] | None:
        """Views of live memory with the words of the bucket that fill each; None if the entry cannot be copied as words."""
        shard = self.shards[entry.name]
        parts = shard.contiguous_parts()
        if parts is None or getattr(torch, entry.dtype) != shard.live.dtype:
            return None
        itemsize, word_copies = shard.live.element_size(), []
        for first, live in parts:
            start, stop = max(first, entry.part_start), min(first + live.numel(), entry.part_stop)
            if start < stop:
                target = live[start - first : stop - first]
                offset = entry.offset + (start - entry.part_start) * itemsize
                if offset % WORD_BYTES or not is_word_aligned(target):
                    return None
                source_slice = slice(offset // WORD_BYTES, (offset + target.nbytes) // WORD_BYTES)
                word_copies.append((target.view(torch.int64), source_slice))
        return word_copies


class TensorMismatch(ValueError):
    """A wire tensor does not fit its live parameter in shape, dtype or memory layout."""


@dataclass(frozen=True, slots=True)
class TpRank:
    """This rank's index among the tensor-parallel ranks of a layer."""

    rank: int = 0
    size: int = 1


_UNSPLIT = TpRank()


class _VocabularyShard(Protocol):
    org_vocab_start_index: int
    org_vocab_end_index: int


class _VocabularyLayer(Protocol):
    """The attributes of an engine's embedding or head that define the rows of a rank."""

    org_vocab_size: int
    shard_indices: _VocabularyShard


class _MoeConfig(Protocol):
    """is_act_and_mul: whether experts have a gate, whose rows precede those of the up-projection."""

    tp_size: int
    tp_rank: int
    is_act_and_mul: bool


class ExpertsLayer(Protocol):
    """The attributes of an engine's MoE layer that define the experts of a rank, and its part of each."""

    moe_config: _MoeConfig
    global_num_experts: int


def find_shard(model: nn.Module, live: torch.Tensor, slot: Slot, shape: tuple[int, ...], tp: TpRank) -> Shard:
    """Find the shard of a wire tensor of `shape` in `live`, the parameter of `slot`. Raises TensorMismatch."""
    owner = model.get_submodule(slot.parameter.rpartition(".")[0])
    if slot.expert is not None:
        return _expert_shard(cast(ExpertsLayer, owner), live, slot, shape)
    data = live if live.dim() else live.reshape(1)
    shape = shape or (1,)
    if len(shape) == data.dim() + 1 and shape[0] == 1:
        shape = shape[1:]  # a model folder may store a vector as a matrix of one row
    if hasattr(owner, "shard_indices"):
        return _vocabulary_shard(cast(_VocabularyLayer, owner), data, shape)
    sizes = part_sizes(owner)
    if slot.parameter.endswith(SCALE_SUFFIX):
        sizes = [-(-size // FP8_BLOCK) for size in sizes]
    if slot.parts is not None or (len(sizes) > 1 and _tp_of(owner).size > 1):
        return _packed_shard(owner, data, slot, shape, sizes)
    if channels := _convolution_channels(model, slot.parameter):
        return _convolution_shard(owner, data, slot.parameter, shape, channels)
    return _plain_shard(data, slot.parameter, shape, _tp_of(owner, tp))


def _tp_of(owner: nn.Module, default: TpRank = _UNSPLIT) -> TpRank:
    """The tensor-parallel rank from the layer's attributes, else the default."""
    return TpRank(getattr(owner, "tp_rank", default.rank), getattr(owner, "tp_size", default.size))


def part_sizes(owner: nn.Module) -> list[int]:
    """Rows of each packed part over all ranks; `[0]` (one part of unknown size) if nothing is packed."""
    return list(getattr(owner, "output_sizes", ())) or [0]


def _mismatch(shape: tuple[int, ...], parameter: str, expected: tuple[int, ...]) -> TensorMismatch:
    return TensorMismatch(f"has shape {shape}, but {parameter} takes {expected}")


def _plain_shard(live: torch.Tensor, parameter: str, shape: tuple[int, ...], tp: TpRank) -> Shard:
    """The shard of a tensor that is replicated, or split along the dimension in which the live tensor is `tp.size` times shorter."""
    local = tuple(live.shape)
    if local == shape:
        return Shard(live, shape, 0, (Run(0, 0, shape[0]),))
    split = [dim for dim, size in enumerate(shape) if len(local) == len(shape) and local[dim] != size]
    if len(split) != 1 or local[split[0]] * tp.size != shape[split[0]]:
        raise _mismatch(shape, parameter, local)
    dim, length = split[0], local[split[0]]
    return Shard(live, shape, dim, (Run(tp.rank * length, 0, length),))


def _vocabulary_shard(owner: _VocabularyLayer, live: torch.Tensor, shape: tuple[int, ...]) -> Shard:
    """The vocabulary rows of this rank. Padding rows are not written."""
    expected = (owner.org_vocab_size, *live.shape[1:])
    if shape != expected:
        raise _mismatch(shape, "an embedding", expected)
    start, stop = owner.shard_indices.org_vocab_start_index, owner.shard_indices.org_vocab_end_index
    return Shard(live, shape, 0, (Run(start, 0, stop - start),) if stop > start else ())


def _packed_shard(owner: nn.Module, live: torch.Tensor, slot: Slot, shape: tuple[int, ...], sizes: list[int]) -> Shard:
    tp, runs, wire = _tp_of(owner), [], 0  # `wire`: start of the next part in the wire tensor
    for part in slot.parts if slot.parts is not None else range(len(sizes)):
        if part >= len(sizes):
            raise TensorMismatch(f"is part {part} of {slot.parameter}, which packs {len(sizes)}")
        # If there are fewer key and value heads than ranks, each is replicated, and `sizes` counts every replica.
        replicas = getattr(owner, "num_kv_head_replicas", 1) if part and len(sizes) == 3 else 1
        length = sizes[part] // tp.size
        runs.append(Run(wire + tp.rank // replicas * length, sum(sizes[:part]) // tp.size, length))
        wire += sizes[part] // replicas
    expected = (wire, *live.shape[1:])
    if shape != expected:
        raise _mismatch(shape, slot.parameter, expected)
    return Shard(live, shape, 0, tuple(runs))


def _convolution_channels(model: nn.Module, parameter: str) -> list[int]:
    """Channels of q, k and v in the short convolution of a gated delta net, which are split separately."""
    layer, _, leaf = parameter.rpartition(".conv1d.")
    if not layer or leaf not in ("weight", "base_layer.weight"):
        return []
    parent = model.get_submodule(layer)
    key, value = getattr(parent, "key_dim", None), getattr(parent, "value_dim", None)
    return [key, key, value] if key is not None and value is not None else []


def _convolution_shard(owner: nn.Module, live: torch.Tensor, parameter: str, shape: tuple[int, ...], channels: list[int]) -> Shard:
    tp, expected = _tp_of(owner), (sum(channels), *live.shape[1:])
    if shape != expected or live.shape[0] * tp.size != sum(channels):
        raise _mismatch(shape, parameter, expected)
    starts = [sum(channels[:index]) for index in range(len(channels))]
    runs = (Run(start + tp.rank * (n // tp.size), start // tp.size, n // tp.size) for start, n in zip(starts, channels, strict=True))
    return Shard(live, shape, 0, tuple(runs))


def _expert_shard(owner: ExpertsLayer, live: torch.Tensor, slot: Slot, shape: tuple[int, ...]) -> Shard:
    assert slot.expert is not None and slot.parts is not None
    local = local_expert(owner, slot.expert)
    is_w13 = slot.parameter.rpartition(".")[2].startswith("w13")
    has_gate = is_w13 and owner.moe_config.is_act_and_mul
    size, rank = owner.moe_config.tp_size, owner.moe_config.tp_rank
    expert_weight = live[0]
    length = expert_weight.shape[0] // (2 if has_gate else 1) if is_w13 else expert_weight.shape[-1]
    expected = (length * size, *expert_weight.shape[1:]) if is_w13 else (*expert_weight.shape[:-1], length * size)
    if shape != expected:
        raise _mismatch(shape, slot.parameter, expected)
    if local is None:
        return Shard(expert_weight, shape, 0, ())
    run = Run(rank * length, slot.parts[0] * length if has_gate else 0, length)
    return Shard(live[local], shape, 0 if is_w13 else len(shape) - 1, (run,))


def local_expert(owner: ExpertsLayer, expert: int) -> int | None:
    """The local index of an expert, or None if the expert is on another rank."""
    mapping = getattr(owner, "expert_map", None)
    if mapping is None:
        return expert
    row = int(mapping[expert])
    return None if row < 0 else row


Portion = tuple[int | None, int | None]
"""An expert (None: not an MoE parameter) and a packed part (None: all parts)."""

PlainWeight = Callable[[nn.Module, str], torch.Tensor]
"""Returns a layer's parameter, by its name in the layer, in the layout for loading weights. Raises TensorMismatch if there is none."""


def parameter_weight(layer: nn.Module, leaf: str) -> torch.Tensor:
    """The parameter as the layer stores it. Raises TensorMismatch for an empty one."""
    weight: torch.Tensor = getattr(layer, leaf).data
    if not weight.numel():
        raise TensorMismatch("belongs to a layer that stores its weight only in a kernel's layout")
    return weight


def match_shards(
    model: nn.Module,
    plan: SectionPlan,
    *,
    rename: Renamer | None = None,
    shared_with: nn.Module | None = None,
    tp: TpRank | None = None,
    dtype: torch.dtype | None = None,
    plain_weight: PlainWeight = parameter_weight,
    derived: Collection[str] = (),
) -> dict[str, Shard]:
    """Find the shard of every tensor of `plan` in `model`.

    Args:
        rename: the model's own rule from wire names to parameter names.
        shared_with: module whose parameters the plan may omit: the target, which shares embedding and LM head with a drafter.
        tp: this rank, for layers that have no attributes for it.
        dtype: the model's dtype. A tensor of this dtype may go to a wider parameter (the decays of a gated delta net are float32 in a
            bfloat16 model); otherwise both dtypes must be equal.
        plain_weight: accesses parameters that the engine stores in a kernel's layout.
        derived: names, within a layer, of parameters that the engine computes from others.

    Raises:
        PlanMismatch: with all errors: unresolved names, shapes, dtypes, and parameters that the plan does not fill.
    """
    live = dict(model.named_parameters(remove_duplicate=False))
    optional_ids = {id(parameter) for parameter in shared_with.parameters()} if shared_with is not None else set()
    shards: dict[str, Shard] = {}
    portions_by_id: dict[int, set[Portion]] = defaultdict(set)
    errors: list[str] = []
    for name, entry in plan.tensors().items():
        slot = next(filter(None, (resolve(alias, live, rename) for alias in (name, *entry.aliases))), None)
        if slot is None:
            errors.append(f"{name} resolves to nothing")
            continue
        portions_by_id[id(live[slot.parameter])] |= {(slot.expert, part) for part in slot.parts or (None,)}
        try:
            shards[name] = _checked_shard(model, slot, entry, tp or _UNSPLIT, dtype, plain_weight)
        except TensorMismatch as error:
            errors.append(f"{name} {error}")
    for name, parameter in live.items():
        if id(parameter) in optional_ids or name.rpartition(".")[2] in derived:
            continue
        portions = portions_by_id[id(parameter)]
        if (None, None) not in portions and not _required_portions(model, name) <= portions:
            errors.append(f"{name} is filled {'only in part' if portions else 'by no tensor'}")
    if errors:
        raise PlanMismatch("the weights do not fit the live model: " + "; ".join(errors))
    return shards


def _checked_shard(
    model: nn.Module, slot: Slot, entry: Entry, tp: TpRank, model_dtype: torch.dtype | None, plain_weight: PlainWeight
) -> Shard:
    path, _, leaf = slot.parameter.rpartition(".")
    live = plain_weight(model.get_submodule(path), leaf)
    shard = find_shard(model, live, slot, entry.shape, tp)
    wire_dtype = getattr(torch, entry.dtype)
    if wire_dtype != live.dtype and not (wire_dtype == model_dtype and torch.promote_types(wire_dtype, live.dtype) == live.dtype):
        raise TensorMismatch(
            f"is sent as {entry.dtype}, but the engine stores {slot.parameter} as {str(live.dtype).removeprefix('torch.')}"
        )
    if not shard.live.is_contiguous():
        raise TensorMismatch(f"belongs to {slot.parameter}, whose memory is not contiguous")
    return replace(shard, dtype=wire_dtype)


def _required_portions(model: nn.Module, name: str) -> set[Portion]:
    """The portions that together fill a parameter that is sent in portions."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    if leaf.startswith(("w13_", "w2_")):
        layer = cast(ExpertsLayer, owner)
        experts = [expert for expert in range(layer.global_num_experts) if local_expert(layer, expert) is not None]
        parts = (0,) if leaf.startswith("w2_") else (0, 1) if layer.moe_config.is_act_and_mul else (1,)
        return {(expert, part) for expert in experts for part in parts}
    return {(None, part) for part in range(len(part_sizes(owner)))}
