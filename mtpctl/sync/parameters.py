"""From the Hugging Face names on the wire to the parameters of an engine's live model.

A live model packs tensors that travel apart (`q_proj`, `k_proj` and `v_proj` in `qkv_proj`, the experts of a layer in two tensors),
wraps a layer that has an adapter (`.base_layer`), and renames by rules of its own. `resolve` finds the `Slot` of a name among the
live names, once for each plan. A tensor has its wire name until it is copied, so no name can be mapped twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from math import prod
from typing import Protocol, cast

import torch
from torch import nn

from mtpctl.sync.checksums import Part, summed

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
"""Layer name on the wire: the layer that packs it, and which of the packed parts it is."""

EXPERTS: dict[str, tuple[str, tuple[int, ...]]] = {"gate_proj": ("w13", (0,)), "up_proj": ("w13", (1,)), "down_proj": ("w2", (0,))}
"""Layer of one expert on the wire: the tensor that holds it for all experts, and which part of an expert's it is."""

_EXPERT = re.compile(r"^(?P<layer>.*\.experts)\.(?P<expert>\d+)\.(?P<proj>gate_proj|up_proj|down_proj)\.(?P<leaf>weight|bias)$")
_EXPERT_HOMES = ("", ".routed_experts", ".base_layer", ".base_layer.routed_experts")
_WRAPPED = "base_layer"


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a wire tensor belongs: a live parameter, which of its packed parts (None: all of it), and which expert's."""

    parameter: str
    parts: tuple[int, ...] | None = None
    expert: int | None = None


def resolve(name: str, live: Collection[str], rename: Renamer | None = None) -> Slot | None:
    """The place of wire name `name` among `live` parameter names, or None where there is none.

    `rename` is the live model's own rule; it is tried first, since the same wire name may mean another layer without it.
    """
    for candidate in _candidates(name, rename):
        for spelled in _wrappings(candidate.parameter):
            if spelled in live:
                return Slot(spelled, candidate.parts, candidate.expert)
    return None


def _candidates(name: str, rename: Renamer | None) -> Iterator[Slot]:
    renamed = rename(name) if rename else None
    # A drafter is a model of its own, whose layers lie under `model.` where the folder says `mtp.`.
    own = f"model.{name.removeprefix('mtp.')}" if name.startswith("mtp.") else name
    for spelled in dict.fromkeys([renamed or name, name, own]):
        yield Slot(spelled)
        yield from _packings(spelled)
        yield from _experts(spelled)


def _packings(name: str) -> Iterator[Slot]:
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part in PACKED:
            owner, place = PACKED[part]
            yield Slot(".".join([*parts[:at], owner, *parts[at + 1 :]]), place)


def _experts(name: str) -> Iterator[Slot]:
    if found := _EXPERT.match(name):
        tensor, part = EXPERTS[found["proj"]]
        for home in _EXPERT_HOMES:
            yield Slot(f"{found['layer']}{home}.{tensor}_{found['leaf']}", part, int(found["expert"]))


def _wrappings(name: str) -> Iterator[str]:
    """The name, and the name with `.base_layer` before its last part taken out or put in."""
    yield name
    layer, _, leaf = name.rpartition(".")
    if layer.endswith(f".{_WRAPPED}"):
        yield f"{layer.removesuffix(f'.{_WRAPPED}')}.{leaf}"
    elif layer:
        yield f"{layer}.{_WRAPPED}.{leaf}"


@dataclass(frozen=True, slots=True)
class Run:
    """`length` steps along the cut dimension: from `wire` on in the whole tensor, from `live` on in the parameter."""

    wire: int
    live: int
    length: int


@dataclass(frozen=True, slots=True)
class Place:
    """A wire tensor of `shape` and `dtype` (None: the live one), cut along `dim`, in the live tensor `live`.

    No runs: another rank holds it.
    """

    live: torch.Tensor
    shape: tuple[int, ...]
    dim: int
    runs: tuple[Run, ...]
    dtype: torch.dtype | None = None

    @property
    def outer(self) -> int:
        """Rows of the matrix that the cut dimension and those behind it make the columns of."""
        return prod(self.shape[: self.dim])

    @property
    def columns(self) -> int:
        """Columns of that matrix."""
        return prod(self.shape[self.dim :])

    def blocks(self) -> list[tuple[int, torch.Tensor]]:
        """Each run as its first column and the live memory `[outer, columns of the run]`."""
        inner = prod(self.shape[self.dim + 1 :])
        matrix = self.live.view(self.outer, -1)
        return [(run.wire * inner, matrix[:, run.live * inner : (run.live + run.length) * inner]) for run in self.runs]

    def write(self, piece: torch.Tensor, start: int, stop: int) -> None:
        """Copy elements `[start, stop)` of the flattened wire tensor to where they belong, those that this rank holds."""
        width = self.columns
        first, last = -(-start // width), stop // width
        edges = [(start, stop)] if first > last else [(start, first * width), (last * width, stop)]
        for column, block in self.blocks():
            end = column + block.shape[1]
            if first < last:
                block[first:last].copy_(piece[first * width - start : last * width - start].view(-1, width)[:, column:end])
            for low, high in edges:
                row = low // width
                low, high = max(low, row * width + column), min(high, row * width + end)
                if low < high:
                    block[row, low - row * width - column : high - row * width - column].copy_(piece[low - start : high - start])

    def sums(self) -> list[Part]:
        """What this rank adds to the tensor's checksum."""
        numel = prod(self.shape)
        return [summed(block.to(self.dtype or block.dtype), numel, self.columns, column) for column, block in self.blocks()]


class Misfit(ValueError):
    """A wire tensor has no place of its shape."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank's number among those that share each layer."""

    rank: int = 0
    size: int = 1


ALONE = Ranks()


class _VocabularyShard(Protocol):
    org_vocab_start_index: int
    org_vocab_end_index: int


class _VocabularyLayer(Protocol):
    """The attributes of an engine's embedding or head that say which rows a rank holds."""

    org_vocab_size: int
    shard_indices: _VocabularyShard


class _MoeConfig(Protocol):
    tp_size: int
    tp_rank: int


class ExpertsLayer(Protocol):
    """The attributes of an engine's layer of experts that say which experts a rank holds, and which part of them."""

    moe_config: _MoeConfig
    global_num_experts: int


def find_place(model: nn.Module, live: torch.Tensor, slot: Slot, shape: tuple[int, ...], ranks: Ranks) -> Place:
    """The place of a wire tensor of `shape` in the live parameter `live` that `slot` names. Raises Misfit."""
    owner = model.get_submodule(slot.parameter.rpartition(".")[0])
    if slot.expert is not None:
        return _expert_place(cast(ExpertsLayer, owner), live, slot, shape)
    shape, data = (shape, live) if shape else ((1,), live.reshape(1))
    if hasattr(owner, "shard_indices"):
        return _vocabulary_place(cast(_VocabularyLayer, owner), data, shape)
    sizes = part_sizes(owner, slot.parameter)
    if slot.parts is not None or (len(sizes) > 1 and _ranks_of(owner).size > 1):
        return _packed_place(owner, data, slot, shape, sizes)
    if sections := _convolution_sections(model, slot.parameter):
        return _sections_place(owner, data, slot.parameter, shape, sections)
    return _cut_place(data, slot.parameter, shape, _ranks_of(owner, ranks))


def _ranks_of(owner: nn.Module, default: Ranks = ALONE) -> Ranks:
    """The ranks that share the layer, as its attributes say, else the default."""
    return Ranks(getattr(owner, "tp_rank", default.rank), getattr(owner, "tp_size", default.size))


def part_sizes(owner: nn.Module, parameter: str) -> list[int]:
    """Rows of each packed part over all ranks; one part where nothing is packed."""
    return list(getattr(owner, "output_sizes", ())) or [0]


def _cut_place(live: torch.Tensor, parameter: str, shape: tuple[int, ...], ranks: Ranks) -> Place:
    """A tensor that is whole here, or cut along the one dimension in which the live one is shorter by the number of ranks."""
    held = tuple(live.shape)
    if held == shape:
        return Place(live, shape, 0, (Run(0, 0, shape[0]),))
    cut = [dim for dim, size in enumerate(shape) if len(held) == len(shape) and held[dim] != size]
    if len(cut) != 1 or held[cut[0]] * ranks.size != shape[cut[0]]:
        raise Misfit(f"has shape {shape}, its place in {parameter} {held}")
    dim, length = cut[0], held[cut[0]]
    return Place(live, shape, dim, (Run(ranks.rank * length, 0, length),))


def _vocabulary_place(owner: _VocabularyLayer, live: torch.Tensor, shape: tuple[int, ...]) -> Place:
    """Rows of the vocabulary that this rank holds. Rows beyond it are padding and receive nothing."""
    if (shape[0], *shape[1:]) != (owner.org_vocab_size, *live.shape[1:]):
        raise Misfit(f"has shape {shape}, its place in an embedding {(owner.org_vocab_size, *live.shape[1:])}")
    held = owner.shard_indices
    start, stop = held.org_vocab_start_index, held.org_vocab_end_index
    return Place(live, shape, 0, (Run(start, 0, stop - start),) if stop > start else ())


def _packed_place(owner: nn.Module, live: torch.Tensor, slot: Slot, shape: tuple[int, ...], sizes: list[int]) -> Place:
    ranks, runs, wire = _ranks_of(owner), [], 0
    for part in slot.parts if slot.parts is not None else range(len(sizes)):
        if part >= len(sizes):
            raise Misfit(f"is part {part} of {slot.parameter}, which packs {len(sizes)}")
        # Key and value heads fewer than ranks are held by several ranks each, and counted once for every one of them.
        copies = getattr(owner, "num_kv_head_replicas", 1) if part and len(sizes) == 3 else 1
        length = sizes[part] // ranks.size
        runs.append(Run(wire + ranks.rank // copies * length, sum(sizes[:part]) // ranks.size, length))
        wire += sizes[part] // copies
    if shape != (wire, *live.shape[1:]):
        raise Misfit(f"has shape {shape}, its place in {slot.parameter} {(wire, *live.shape[1:])}")
    return Place(live, shape, 0, tuple(runs))


def _convolution_sections(model: nn.Module, parameter: str) -> list[int]:
    """Channels of q, k and v under the short convolution of a gated delta net, which are cut each by itself."""
    layer, _, rest = parameter.rpartition(".conv1d.")
    if not layer or rest not in ("weight", "base_layer.weight"):
        return []
    parent = model.get_submodule(layer)
    key, value = getattr(parent, "key_dim", None), getattr(parent, "value_dim", None)
    return [key, key, value] if key is not None and value is not None else []


def _sections_place(owner: nn.Module, live: torch.Tensor, parameter: str, shape: tuple[int, ...], sections: list[int]) -> Place:
    rank, size = _ranks_of(owner).rank, _ranks_of(owner).size
    if shape != (sum(sections), *live.shape[1:]) or live.shape[0] * size != sum(sections):
        raise Misfit(f"has shape {shape}, its place in {parameter} {(sum(sections), *live.shape[1:])}")
    runs = tuple(
        Run(sum(sections[:i]) + rank * (length // size), sum(sections[:i]) // size, length // size) for i, length in enumerate(sections)
    )
    return Place(live, shape, 0, runs)


def _expert_place(owner: ExpertsLayer, live: torch.Tensor, slot: Slot, shape: tuple[int, ...]) -> Place:
    assert slot.expert is not None and slot.parts is not None
    local = local_expert(owner, slot.expert)
    wide = slot.parameter.rpartition(".")[2].startswith("w13")
    size, rank = owner.moe_config.tp_size, owner.moe_config.tp_rank
    one = live[0]
    length = one.shape[0] // 2 if wide else one.shape[-1]
    whole = (length * size, *one.shape[1:]) if wide else (*one.shape[:-1], length * size)
    if shape != whole:
        raise Misfit(f"has shape {shape}, its place in {slot.parameter} {whole}")
    if local is None:
        return Place(one, shape, 0, ())
    run = Run(rank * length, slot.parts[0] * length if wide else 0, length)
    return Place(live[local], shape, 0 if wide else len(shape) - 1, (run,))


def local_expert(owner: ExpertsLayer, expert: int) -> int | None:
    """The row that an expert has on this rank, or None where another rank holds it."""
    mapping = getattr(owner, "expert_map", None)
    if mapping is None:
        return expert
    found = int(mapping[expert])
    return None if found < 0 else found
