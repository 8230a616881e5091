"""Writes and reads checkpoints a few parameters at a time, in the format of `mtpctl.checkpoint.sharded`.

PyTorch's writer takes the state of a whole rank at once: it plans, writes one file for each rank, and then writes the metadata. Here each
part has its own plan and file, as if it were a rank, and the metadata is written last. The result loads like any other checkpoint.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemWriter, LoadPlan, SavePlan
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from mtpctl.checkpoint.listing import flush, write_listing
from mtpctl.checkpoint.reading import reader_of, reading
from mtpctl.checkpoint.sharded import write_weights_only_record
from mtpctl.convert.skeleton import Skeleton
from mtpctl.errors import UserError

PART_BYTES = 512 << 20
"""Maximum size of a part with more than one parameter. A part's tensors are in memory until it is written."""
MARKER = "conversion.lock"
"""Name of the file that marks the temporary folder of a conversion."""

Make = Callable[[str], Tensor]
"""Computes the value of the named parameter."""


def partition(sizes: Mapping[str, int]) -> list[list[str]]:
    """Split the names, in order, into parts of at most `PART_BYTES`. A larger parameter is a part by itself."""
    parts: list[list[str]] = []
    part_bytes = PART_BYTES + 1
    for name, nbytes in sizes.items():
        if part_bytes + nbytes > PART_BYTES:
            parts.append([])
            part_bytes = 0
        parts[-1].append(name)
        part_bytes += nbytes
    return parts


class PartWriter:
    """Writes a checkpoint without optimizer state to `folder`, a part at a time. dtypes: dtype of each parameter."""

    def __init__(self, folder: Path, skeleton: Skeleton, dtypes: Mapping[str, torch.dtype]) -> None:
        self.folder, self.skeleton = folder, skeleton
        parameters = skeleton.parameters
        sizes = {name: _numel(parameters[name].shape) * dtypes[name].itemsize for name in parameters}
        self.parts = partition(sizes)
        self.nbytes = [sum(sizes[name] for name in part) for part in self.parts]
        self._owners: dict[tuple[str, torch.Size], str] = {}
        self._last: tuple[str, dict[tuple[str, torch.Size], Tensor]] = ("", {})
        self._results: list[WriteResult] = []
        self._writer = FileSystemWriter(folder, sync_files=False)
        plans = [SavePlan([item for name in part for item in self._items(name, dtypes[name])]) for part in self.parts]
        plans[0].items.extend(WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO) for key in self._objects())
        plans, self._metadata = create_default_global_save_plan(plans)
        self._plans = self._writer.prepare_global_plan(plans)

    def _objects(self) -> dict[str, object]:
        """The objects that megatron-core saves in addition to tensors: extra states, and the common state, which is empty."""
        common = ShardedObject("common_state", {}, (1,), (0,))
        return {each.unique_key: each.data for each in (*self.skeleton.objects, common)}

    def _items(self, name: str, dtype: torch.dtype) -> Iterable[WriteItem]:
        value = torch.empty(self.skeleton.parameters[name].shape, dtype=dtype, device="meta")
        for piece in self.skeleton.pieces(name, value):
            offset = torch.Size(piece.global_offset)
            self._owners[piece.key, offset] = name
            yield WriteItem(
                index=MetadataIndex(piece.key, offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offset, sizes=torch.Size(_stored_shape(piece))),
                    properties=TensorProperties(dtype=dtype),
                    size=torch.Size(piece.global_shape),
                ),
            )

    def write(self, number: int, make: Make) -> None:
        """Write a part. `make` computes each of its parameters when it is written."""
        planner = _Resolve(self._objects(), lambda index: self._piece(index, make))
        self._results += self._writer.write_data(self._plans[number], planner).wait()
        self._last = ("", {})

    def _piece(self, index: MetadataIndex, make: Make) -> Tensor:
        assert index.offset is not None
        key = index.fqn, index.offset
        name = self._owners[key]
        if self._last[0] != name:
            pieces = self.skeleton.pieces(name, make(name))
            values = {(p.key, torch.Size(p.global_offset)): p.data.reshape(_stored_shape(p)) for p in pieces if p.data is not None}
            self._last = (name, values)
        return self._last[1][key]

    def flush(self, number: int) -> None:
        flush(self.folder / f"{self._plans[number].storage_data.prefix}0.distcp")

    def finish(self) -> None:
        """Write the metadata, `engine.json` and the listing, which make the folder a checkpoint."""
        self._writer.finish(self._metadata, [self._results])
        save_config(CheckpointingConfig("torch_dist"), str(self.folder))
        write_weights_only_record(self.folder)
        write_listing(self.folder, 1, {}, without=[MARKER])


class Reader(Protocol):
    """Reads a model's parameters a part at a time."""

    skeleton: Skeleton
    parts: list[list[str]]
    nbytes: list[int]
    dtypes: dict[str, torch.dtype]

    def read(self, number: int) -> dict[str, Tensor]:
        """The values of a part's parameters."""


class PartReader:
    """Reads the weights of a checkpoint, whatever its parallel layout."""

    def __init__(self, path: Path, skeleton: Skeleton) -> None:
        self.path, self.skeleton = path, skeleton
        self._reader = reader_of(path)
        with reading(path):
            metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._saved = {name: saved for name, saved in metadata.state_dict_metadata.items() if isinstance(saved, TensorStorageMetadata)}
        self.dtypes = {name: self._dtype(name) for name in skeleton.parameters}
        sizes = {name: _numel(p.shape) * self.dtypes[name].itemsize for name, p in skeleton.parameters.items()}
        self.parts = partition(sizes)
        self.nbytes = [sum(sizes[name] for name in part) for part in self.parts]

    def _dtype(self, name: str) -> torch.dtype:
        """The saved dtype of the parameter. Raises UserError if the parameter is missing or has another shape."""
        pieces = list(self.skeleton.pieces(name, torch.empty(self.skeleton.parameters[name].shape, device="meta")))
        for piece in pieces:
            saved = self._saved.get(piece.key)
            if saved is None:
                raise UserError(f"{self.path}: lacks {piece.key}, which its model's config requires")
            size, wanted = list(saved.size), list(piece.global_shape)
            # A saved vocabulary may have padding rows.
            if size != wanted and not (piece.allow_shape_mismatch and size[1:] == wanted[1:] and size[0] > wanted[0]):
                raise UserError(f"{self.path}: holds {piece.key} as {size}, its model's config makes it {wanted}")
        return self._saved[pieces[0].key].properties.dtype

    def read(self, number: int) -> dict[str, Tensor]:
        """The values of a part's parameters."""
        values = {name: torch.empty(self.skeleton.parameters[name].shape, dtype=self.dtypes[name]) for name in self.parts[number]}
        targets: dict[tuple[str, torch.Size], Tensor] = {}
        items: list[ReadItem] = []
        for name, value in values.items():
            for piece in self.skeleton.pieces(name, value):
                assert piece.data is not None and piece.data.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
                shape, offset = torch.Size(_stored_shape(piece)), torch.Size(piece.global_offset)
                targets[piece.key, offset] = piece.data.view(shape)
                items += create_read_items_for_chunk_list(piece.key, self._saved[piece.key], [ChunkStorageMetadata(offset, shape)])
        with reading(self.path):
            self._reader.read_data(LoadPlan(items), _Fill(targets)).wait()
        return values


class _Fill(DefaultLoadPlanner):
    """Maps each item to the tensor that its data is read into."""

    def __init__(self, targets: Mapping[tuple[str, torch.Size], Tensor]) -> None:
        super().__init__()
        self.targets = targets

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self.targets[read_item.dest_index.fqn, torch.Size(read_item.dest_index.offset or ())]
        for dimension, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dimension, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


class _Resolve(DefaultSavePlanner):
    """Computes the data of an item when the writer requests it."""

    def __init__(self, objects: Mapping[str, object], tensor: Callable[[MetadataIndex], Tensor]) -> None:
        super().__init__()
        self.objects, self.tensor = objects, tensor

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type is not WriteItemType.BYTE_IO:
            return self.tensor(write_item.index)
        stream = io.BytesIO()
        torch.save([self.objects[write_item.index.fqn]], stream)
        return stream


def _numel(shape: Iterable[int]) -> int:
    return torch.Size(shape).numel()


def _stored_shape(piece: ShardedTensor) -> tuple[int, ...]:
    return (1,) * piece.prepend_axis_num + tuple(piece.local_shape)


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a folder in megatron-core's distributed format."""
    try:
        return path.is_dir() and dist_checkpointing.check_is_distributed_checkpoint(str(path))
    except (OSError, json.JSONDecodeError):
        return False
