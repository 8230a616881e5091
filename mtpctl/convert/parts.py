"""Writes and reads checkpoints in parts of a few parameters, in the format of `mtpctl.checkpoint.sharded`.

A `ConversionModel` is a model in one process without weights: its parameters, with their names and shapes in checkpoints and Hugging Face
folders. It uses almost no memory for a model of any size, because the operating system allocates none for pages that are never written.

PyTorch's writer takes the state of a whole rank at once: it plans, writes one file for each rank, and then writes the metadata. Here each
part has its own plan and file, as if it were a rank, and the metadata is written last. The result loads like any other checkpoint.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemWriter, LoadPlan, SavePlan
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from mtpctl.checkpoint.listing import flush, write_listing
from mtpctl.checkpoint.reading import convert_read_errors, reader_of
from mtpctl.checkpoint.sharded import write_weights_only_record
from mtpctl.convert.bridge import StreamMap, WeightBridge
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.convert.mappings import LocalTask, hf_names, is_packed_experts
from mtpctl.errors import UserError
from mtpctl.families.tensors import aliases, tensor_shapes
from mtpctl.model.build import build_model, complete_config
from mtpctl.model.lora import attach_adapters
from mtpctl.model.parallel import ProcessGroups, Rank
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.section import ParallelConfig
from mtpctl.recipe.train import LoraConfig

_EXPERT_INDEX = re.compile(r"\.local_experts\.(\d+)\.")


@dataclass(frozen=True)
class Parameter:
    """A Megatron parameter. hf_names: names of the Hugging Face tensors from which it is converted."""

    name: str
    shape: tuple[int, ...]
    hf_names: tuple[str, ...]
    task: LocalTask


class ConversionModel:
    """The model of a folder's config without weights, with MTP layers if `mtp` is set, and with adapters if `lora` is given.

    It uses the same mapping as the trainer. It creates process groups, which `close` destroys.
    """

    def __init__(self, folder: HfFolder, *, mtp: bool, precision: str = "bf16", lora: LoraConfig | None = None) -> None:
        self.shape = shape = folder.shape
        self.groups = ProcessGroups(Rank(), ParallelConfig())
        try:
            self.bridge, mtp_config = WeightBridge(folder), MtpConfig(mode="load" if mtp else "off")
            transformer_config = complete_config(
                self.bridge.config(), shape, parallel=ParallelConfig(), precision=precision, mtp=mtp_config
            )
            self.model = build_model(transformer_config, shape, mtp_config)
            if lora is not None:
                attach_adapters(self.model, lora, seed=0)
            self._state = self.model.sharded_state_dict()
            self._map = StreamMap(self.bridge, [self.model], {*tensor_shapes(shape), *aliases(shape)})
            self._check_mapped()
        except BaseException:
            self.groups.close()
            raise
        self.parameters = {
            task.param_name: Parameter(task.param_name, tuple(task.param_weight.shape), _required_tensors(task), task)
            for task in self._map.tasks
        }
        self.objects = [value for value in self._state.values() if isinstance(value, ShardedObject)]
        """The objects that checkpoints store in addition to tensors."""

    def _check_mapped(self) -> None:
        """Raise UserError if a parameter has no tensor in the mapping."""
        mapped = {task.param_name for task in self._map.tasks}
        missing = [name for name, _ in self.model.named_parameters() if name not in mapped and ".adapter." not in name]
        if missing:
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            raise UserError(
                f"{self.bridge.folder.path}: no Hugging Face tensor is known for {', '.join(missing[:4])}{more}; "
                "such a model cannot be converted"
            )

    def pieces(self, name: str, value: Tensor) -> Iterator[ShardedTensor]:
        """The sharded tensors that a checkpoint stores for the parameter, with `value` as their data."""
        sharded = self._state[name]
        if isinstance(sharded, ShardedTensorFactory):
            yield from _build_pieces(replace(sharded, data=value))
        else:
            yield replace(sharded, data=value, dtype=value.dtype)

    def checkpoint_keys(self) -> Iterator[tuple[str, str]]:
        """Every name of the state, adapters included, with its key in checkpoints (the first one if it has several)."""
        for name, sharded in self._state.items():
            if isinstance(sharded, ShardedTensorFactory):
                yield name, next(_build_pieces(sharded)).key
            elif isinstance(sharded, ShardedTensor):
                yield name, sharded.key

    def to_megatron(self, name: str, weights: Mapping[str, Tensor]) -> Tensor:
        """Convert the tensors in `weights` to the value of a parameter."""
        parameter = self.parameters[name]
        mapping = parameter.task.mapping
        if is_packed_experts(parameter.task):
            # The mapping expects a packed tensor, but also accepts the matrix of a single expert.
            source: Tensor | dict[str, Tensor] = torch.cat([weights[source_name] for source_name in parameter.hf_names])
        else:
            source = self._map.bridge.maybe_modify_loaded_hf_weight(mapping.hf_param, weights)
        value = mapping.hf_to_megatron(source, parameter.task.megatron_module)
        assert tuple(value.shape) == parameter.shape, f"{name}: {tuple(value.shape)} converted, {parameter.shape} expected"
        return value

    @torch.no_grad()
    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Load all parameters except adapters from `weights`."""
        for name, parameter in self.parameters.items():
            parameter.task.param_weight.copy_(self.to_megatron(name, weights))

    def to_hf(self, name: str, value: Tensor) -> dict[str, Tensor]:
        """Convert the value of a parameter to Hugging Face tensors, without the rows that pad the vocabulary."""
        parameter = self.parameters[name]
        tensors = parameter.task.mapping.megatron_to_hf(value, parameter.task.megatron_module)
        if is_packed_experts(parameter.task):
            (packed,) = tensors.values()
            tensors = dict(zip(parameter.hf_names, packed.chunk(len(parameter.hf_names)), strict=True))
        else:
            tensors = dict(self._map.bridge.maybe_modify_converted_hf_weight(parameter.task, tensors, {}))
        embeddings = (self.shape.embedding_name, "lm_head.weight")
        return {name: tensor[: self.shape.vocab] if name in embeddings else tensor for name, tensor in tensors.items()}

    def close(self) -> None:
        self.groups.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _build_pieces(factory: ShardedTensorFactory) -> Iterator[ShardedTensor]:
    return (piece for piece in nested_values({"": factory.build()}) if isinstance(piece, ShardedTensor))


def _required_tensors(task: LocalTask) -> tuple[str, ...]:
    if not is_packed_experts(task):
        return hf_names(task)
    expert = _EXPERT_INDEX.search(task.param_name)
    assert expert is not None, f"{task.param_name} is packed, but not an expert"
    prefix, _, packed_name = hf_names(task)[0].rpartition(".")
    parts = ("gate", "up") if packed_name == "gate_up_proj" else ("down",)
    return tuple(f"{prefix}.{expert[1]}.{part}_proj.weight" for part in parts)


PART_BYTES = 512 << 20
"""Maximum size of a part with more than one parameter. A part's tensors are in memory until it is written."""
MARKER = "conversion.lock"
"""Name of the file that marks the temporary folder of a conversion."""

Compute = Callable[[str], Tensor]
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

    def __init__(self, folder: Path, conversion: ConversionModel, dtypes: Mapping[str, torch.dtype]) -> None:
        self.folder, self.conversion = folder, conversion
        parameters = conversion.parameters
        sizes = {name: _numel(parameters[name].shape) * dtypes[name].itemsize for name in parameters}
        self.parts = partition(sizes)
        self.nbytes = [sum(sizes[name] for name in part) for part in self.parts]
        self._parameter_of_piece: dict[tuple[str, torch.Size], str] = {}
        self._computed_name = ""
        self._computed_pieces: dict[tuple[str, torch.Size], Tensor] = {}
        self._results: list[WriteResult] = []
        self._writer = FileSystemWriter(folder, sync_files=False)
        plans = [SavePlan([item for name in part for item in self._plan_items(name, dtypes[name])]) for part in self.parts]
        plans[0].items.extend(WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO) for key in self._saved_objects())
        plans, self._metadata = create_default_global_save_plan(plans)
        self._plans = self._writer.prepare_global_plan(plans)

    def _saved_objects(self) -> dict[str, object]:
        """The objects that megatron-core saves in addition to tensors: extra states, and the common state, which is empty."""
        common = ShardedObject("common_state", {}, (1,), (0,))
        return {saved_object.unique_key: saved_object.data for saved_object in (*self.conversion.objects, common)}

    def _plan_items(self, name: str, dtype: torch.dtype) -> Iterable[WriteItem]:
        value = torch.empty(self.conversion.parameters[name].shape, dtype=dtype, device="meta")
        for piece in self.conversion.pieces(name, value):
            offset = torch.Size(piece.global_offset)
            self._parameter_of_piece[piece.key, offset] = name
            yield WriteItem(
                index=MetadataIndex(piece.key, offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offset, sizes=torch.Size(_stored_shape(piece))),
                    properties=TensorProperties(dtype=dtype),
                    size=torch.Size(piece.global_shape),
                ),
            )

    def write(self, part_index: int, compute: Compute) -> None:
        """Write a part. Calls `compute` for each parameter of the part, just before writing that parameter."""
        planner = _LazySave(self._saved_objects(), lambda index: self._compute_piece(index, compute))
        self._results += self._writer.write_data(self._plans[part_index], planner).wait()
        self._computed_name, self._computed_pieces = "", {}

    def _compute_piece(self, index: MetadataIndex, compute: Compute) -> Tensor:
        assert index.offset is not None
        key = index.fqn, index.offset
        name = self._parameter_of_piece[key]
        if self._computed_name != name:
            pieces = self.conversion.pieces(name, compute(name))
            self._computed_pieces = {
                (piece.key, torch.Size(piece.global_offset)): piece.data.reshape(_stored_shape(piece))
                for piece in pieces
                if piece.data is not None
            }
            self._computed_name = name
        return self._computed_pieces[key]

    def flush(self, part_index: int) -> None:
        flush(self.folder / f"{self._plans[part_index].storage_data.prefix}0.distcp")

    def finish(self) -> None:
        """Write the metadata, `engine.json` and the listing, which make the folder a checkpoint."""
        self._writer.finish(self._metadata, [self._results])
        save_config(CheckpointingConfig("torch_dist"), str(self.folder))
        write_weights_only_record(self.folder)
        write_listing(self.folder, 1, {}, exclude=[MARKER])


class Reader(Protocol):
    """Reads a model's parameters a part at a time."""

    conversion: ConversionModel
    parts: list[list[str]]
    nbytes: list[int]
    dtypes: dict[str, torch.dtype]

    def read(self, index: int) -> dict[str, Tensor]:
        """The values of a part's parameters."""


class PartReader:
    """Reads the weights of a checkpoint, whatever its parallel layout."""

    def __init__(self, path: Path, conversion: ConversionModel) -> None:
        self.path, self.conversion = path, conversion
        self._reader = reader_of(path)
        with convert_read_errors(path):
            metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._saved = {name: entry for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)}
        self.dtypes = {name: self._dtype(name) for name in conversion.parameters}
        sizes = {name: _numel(parameter.shape) * self.dtypes[name].itemsize for name, parameter in conversion.parameters.items()}
        self.parts = partition(sizes)
        self.nbytes = [sum(sizes[name] for name in part) for part in self.parts]

    def _dtype(self, name: str) -> torch.dtype:
        """The saved dtype of the parameter. Raises UserError if the parameter is missing or has another shape."""
        pieces = list(self.conversion.pieces(name, torch.empty(self.conversion.parameters[name].shape, device="meta")))
        for piece in pieces:
            entry = self._saved.get(piece.key)
            if entry is None:
                raise UserError(f"{self.path}: lacks {piece.key}, which the model's config requires")
            size, expected = list(entry.size), list(piece.global_shape)
            # A saved vocabulary may have padding rows.
            if size != expected and not (piece.allow_shape_mismatch and size[1:] == expected[1:] and size[0] > expected[0]):
                raise UserError(f"{self.path}: {piece.key} is {size}, but the model's config requires {expected}")
        return self._saved[pieces[0].key].properties.dtype

    def read(self, index: int) -> dict[str, Tensor]:
        """The values of a part's parameters."""
        values = {name: torch.empty(self.conversion.parameters[name].shape, dtype=self.dtypes[name]) for name in self.parts[index]}
        targets: dict[tuple[str, torch.Size], Tensor] = {}
        items: list[ReadItem] = []
        for name, value in values.items():
            for piece in self.conversion.pieces(name, value):
                assert piece.data is not None and piece.data.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
                shape, offset = torch.Size(_stored_shape(piece)), torch.Size(piece.global_offset)
                targets[piece.key, offset] = piece.data.view(shape)
                items += create_read_items_for_chunk_list(piece.key, self._saved[piece.key], [ChunkStorageMetadata(offset, shape)])
        with convert_read_errors(self.path):
            self._reader.read_data(LoadPlan(items), _LoadInto(targets)).wait()
        return values


class _LoadInto(DefaultLoadPlanner):
    """Maps each item to the tensor into which its data is read."""

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


class _LazySave(DefaultSavePlanner):
    """Computes the data of an item when the writer requests it."""

    def __init__(self, objects: Mapping[str, object], compute_tensor: Callable[[MetadataIndex], Tensor]) -> None:
        super().__init__()
        self.objects, self.compute_tensor = objects, compute_tensor

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type is not WriteItemType.BYTE_IO:
            return self.compute_tensor(write_item.index)
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
