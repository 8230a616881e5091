"""Checkpoints in megatron-core's distributed format, which can be saved and restored under different parallel layouts.

A checkpoint is a folder with the shards and their metadata, `engine.json` with the step count and the caller's state, and the listing of
its files with their checksums. It is written to a temporary folder and then renamed, so a folder with its final name is complete.

A thread writes the shards and computes their checksums. `Save` plans the shards and copies them to host memory before the thread starts.
No collective runs in the thread, so none overlaps with those of a training step.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypedDict

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory, apply_factories
from megatron.core.transformer import MegatronModule
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from mtpctl.checkpoint.finding import ENGINE_FILE, REPLACED, next_number
from mtpctl.checkpoint.listing import Checksum, Entry, flush, write_listing
from mtpctl.checkpoint.reading import convert_read_errors, tensors_in
from mtpctl.compat import megatron_core
from mtpctl.errors import MtpctlError, SaveFailed, UserError

_FORMAT = 1
_METADATA_RESERVE_BYTES = 16 << 20
"""Upper bound on the size of a checkpoint's metadata files."""
_MAX_TP = 64
"""Maximum number of tp ranks over which a vocabulary is sharded."""


class AdapterRecord(TypedDict):
    """The adapters in a checkpoint: a fingerprint of their base weights, and the LoRA settings."""

    base: str
    rank: int
    alpha: float
    targets: list[str]


class EngineRecord(TypedDict):
    """The contents of `engine.json`.

    number: sequence number of the checkpoint, as in its listing; 0 while it is written. steps: optimizer steps.
    optimizer: whether its state was saved. state: the caller's state.
    """

    format: int
    number: int
    steps: int
    optimizer: bool
    adapter: AdapterRecord | None
    state: dict[str, object]


type Sharded = ShardedTensor | ShardedTensorFactory
type ShardedTree = dict[str, dict[str, Sharded]]
"""Section (`model`, `optimizer`) → name → sharded tensor, as megatron-core saves and loads them."""

type WriteBucket = tuple[Path, str, tuple[list[tuple[object, object]], list[tuple[object, Tensor]]]]
"""One file that megatron-core writes: the path, a key, and two lists of pairs: (write item, bytes) and (write item, tensor)."""


@dataclass
class Slot:
    """The optimizer state of a parameter (moments and master weights): one tensor for each of `kinds`.

    Each tensor has the shape of the local parameter. With the distributed optimizer it is this dp rank's flat shard, elements `start` to
    `end`; `group` contains the ranks with the other shards. A rank without a shard of this parameter has no tensors.
    """

    parameter: Tensor
    tensors: dict[str, Tensor]
    kinds: tuple[str, ...]
    start: int = 0
    end: int = 0
    group: dist.ProcessGroup | None = None

    def unsharded(self, kind: str) -> Tensor:
        """The unsharded tensor in the parameter's shape. With a `group`, collective, and in fp32."""
        if self.group is None:
            return self.tensors[kind]
        flat = torch.zeros(self.parameter.numel(), dtype=torch.float32, device=self.parameter.device)
        if self.tensors:
            flat[self.start : self.end] = self.tensors[kind]
        dist.all_reduce(flat, group=self.group)
        return flat.view(self.parameter.shape)

    def fill(self, kind: str, value: Tensor) -> None:
        """Copy this rank's shard of `value` (in the parameter's shape) into the state."""
        if not self.tensors:
            return
        target = self.tensors[kind]
        source = value if self.group is None else value.flatten()[self.start : self.end]
        if source.data_ptr() != target.data_ptr():
            target.copy_(source.view(target.shape))


@dataclass(frozen=True)
class Contents:
    """The model and optimizer state that a checkpoint is saved from or restored into.

    slots: the optimizer's state after `steps` steps; None without an optimizer. names: the parameters in the checkpoint; None for all.
    adapter: set if the checkpoint has adapters instead of the trunk's weights.
    """

    model: MegatronModule
    slots: Sequence[Slot] | None
    steps: int
    names: set[str] | None
    adapter: AdapterRecord | None

    def sharded_tree(self, *, for_load: bool) -> ShardedTree:
        """The sharded tensors. for_load: allocate empty tensors for a sharded optimizer's state instead of gathering it."""
        sharded = self.model.sharded_state_dict()
        model: dict[str, Sharded] = {name: value for name, value in sharded.items() if self.names is None or name in self.names}
        tree = {"model": model}
        if self.slots is not None:
            tree["optimizer"] = _optimizer_tree(self.slots, model, for_load=for_load)
        return tree

    def live_storages(self) -> set[int]:
        """Data pointers of the storages that the next training step overwrites."""
        tensors: list[Tensor] = list(self.model.parameters())
        tensors += [tensor for slot in self.slots or [] for tensor in slot.tensors.values()]
        return {tensor.untyped_storage().data_ptr() for tensor in tensors}


class Save:
    """A checkpoint that is being written to `path`. The constructor and all methods are collective.

    folder: the temporary folder. The caller may add files, which become part of the checkpoint.
    """

    def __init__(self, path: Path, contents: Contents, state: dict[str, object], *, concurrent: bool = False) -> None:
        """Plan the shards, copy them to host memory, and start a thread if this rank has shards to write.

        concurrent: training continues meanwhile, so tensors that a step overwrites are copied even if they are in host memory.
        Raises SaveFailed on every rank if the temporary folder cannot be created.
        """
        megatron_core.use_local_queue()
        megatron_core.compute_checksums(Checksum)
        self.path, self.folder = path, path.with_name(path.name + ".partial")
        self._record: EngineRecord = {
            "format": _FORMAT,
            "number": 0,
            "steps": contents.steps,
            "optimizer": contents.slots is not None,
            "adapter": contents.adapter,
            "state": state,
        }
        error: Exception | None = None
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            try:
                self.folder.mkdir(parents=True)
            except OSError as failure:
                error = failure
        _raise_on_all_ranks(self.path, error)
        request = dist_checkpointing.save(
            contents.sharded_tree(for_load=False), str(self.folder), async_sharded_save=True, async_strategy="mcore"
        )
        self._finalize = request.finalize_fns
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._files: list[str] = []
        if request.async_fn is not None:
            rank, _, results = request.async_fn_args
            buckets = _copy_live(request.preload_fn(), contents.live_storages() if concurrent else set())
            self._files = [str(file) for file, _, _ in buckets]
            self._thread = threading.Thread(target=self._write, args=(request.async_fn, rank, buckets, results), daemon=True)
            self._thread.start()

    def _write(self, write: Callable[..., None], *args: object) -> None:
        try:
            write(*args)
        except BaseException as error:
            self._error = error

    def is_written(self) -> bool:
        """Whether the threads of all ranks have finished."""
        writing = torch.tensor(float(self._thread is not None and self._thread.is_alive()))
        dist.all_reduce(writing)
        return not writing

    def finish(self, added_files: Mapping[str, Entry] | None = None) -> None:
        """Wait for the thread, and rename the checkpoint to its final path. added_files: entries of files that the caller has added.

        Raises SaveFailed on every rank if any rank failed to write. The incomplete checkpoint is then deleted to free its disk space.
        """
        if self._thread is not None:
            self._thread.join()
        try:
            self._finish(added_files or {})
        except SaveFailed:
            self.abandon()
            raise

    def _finish(self, added_files: Mapping[str, Entry]) -> None:
        error = self._error
        if dist.get_rank() == 0 and error is None:
            try:
                _check_disk_space(self.folder)
            except OSError as failure:
                error = failure
        _raise_on_all_ranks(self.path, error)
        try:
            for step in self._finalize:
                step()
        except CheckpointException as failure:
            raise SaveFailed(f"checkpoint {self.path} was not written: {failure}") from failure
        shard_entries = self._gather_entries()
        error = None
        if dist.get_rank() == 0:
            try:
                self._record["number"] = next_number(self.path.parent)
                (self.folder / ENGINE_FILE).write_text(json.dumps(self._record))
                write_listing(self.folder, self._record["number"], {**shard_entries, **added_files})
                flush(self.folder)
                _replace(self.path, self.folder)
            except (OSError, MtpctlError) as failure:
                error = failure
        _raise_on_all_ranks(self.path, error)

    def _gather_entries(self) -> dict[str, Entry]:
        """The entries of the shards of all ranks."""
        rank_entries: list[dict[str, Entry]] = [{}] * dist.get_world_size()
        local_entries = megatron_core.take_checksums(self._files)
        dist.all_gather_object(rank_entries, {Path(file).name: entry for file, entry in local_entries.items()})
        return {name: entry for entries in rank_entries for name, entry in entries.items()}

    def abandon(self) -> None:
        """Wait for the thread, and delete the checkpoint."""
        if self._thread is not None:
            self._thread.join()
        megatron_core.take_checksums(self._files)
        megatron_core.discard_results()
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)


def _check_disk_space(folder: Path) -> None:
    """Raise OSError if the disk is too full for the metadata, which rank 0 writes last while other ranks wait."""
    trial = folder / "space"
    try:
        trial.write_bytes(bytes(_METADATA_RESERVE_BYTES))
    finally:
        trial.unlink(missing_ok=True)


def _replace(path: Path, complete: Path) -> None:
    """Rename `complete` to `path`. An existing folder is renamed first and deleted last, so that a crash leaves at least one of the two."""
    replaced = path.with_name(path.name + REPLACED)
    shutil.rmtree(replaced, ignore_errors=True)
    if path.exists():
        path.rename(replaced)
    complete.rename(path)
    flush(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def write_weights_only_record(folder: Path) -> None:
    """Write `engine.json` for a checkpoint that contains only weights."""
    record: EngineRecord = {"format": _FORMAT, "number": 1, "steps": 0, "optimizer": False, "adapter": None, "state": {}}
    (folder / ENGINE_FILE).write_text(json.dumps(record))


def _raise_on_all_ranks(path: Path, error: BaseException | None) -> None:
    """Raise SaveFailed on all ranks if any rank has an error."""
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, None if error is None else f"{type(error).__name__}: {error}")
    if failed := [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text]:
        raise SaveFailed(f"checkpoint {path} was not written: {failed[0]}") from error


def _copy_live(buckets: list[WriteBucket], live: set[int]) -> list[WriteBucket]:
    """The buckets, with each tensor whose storage is in `live` replaced by a copy."""

    def copy(tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.untyped_storage().data_ptr() in live else tensor

    return [(file, key, (data, [(item, copy(tensor)) for item, tensor in tensors])) for file, key, (data, tensors) in buckets]


def restore(path: Path, contents: Contents) -> EngineRecord:
    """Load the checkpoint at `path` into the contents. Returns its record.

    Raises UserError if the checkpoint cannot be read or, before anything is overwritten, if it belongs to another model.
    """
    record = _read_record(path)
    _check_adapter(path, record["adapter"], contents.adapter)
    if contents.slots is not None and not record["optimizer"]:
        raise UserError(f"{path} was saved without an optimizer; it contains only weights")
    tree = contents.sharded_tree(for_load=True)
    _check_fit(path, tree)
    with convert_read_errors(path):
        loaded = dist_checkpointing.load(tree, str(path))
    contents.model.load_state_dict(loaded["model"], strict=False)
    for number, slot in enumerate(contents.slots or []):
        for kind in slot.kinds:
            slot.fill(kind, loaded["optimizer"][f"{number}.{kind}"])
    return record


def _check_adapter(path: Path, saved: AdapterRecord | None, expected: AdapterRecord | None) -> None:
    if saved is None and expected is None:
        return
    if saved is None or expected is None:
        contents, fix = ("all weights", "remove train.lora") if saved is None else ("an adapter", "set train.lora")
        raise UserError(f"{path} has {contents}, which this run does not train; {fix}, or start in another run_dir")
    if saved["base"] != expected["base"]:
        raise UserError(f"model.path: the adapter in {path} was trained on other weights ({saved['base']}) than these ({expected['base']})")
    settings: tuple[Literal["rank", "alpha", "targets"], ...] = ("rank", "alpha", "targets")
    for name in settings:
        if saved[name] != expected[name]:
            raise UserError(f"train.lora.{name}: {expected[name]}, but the adapter in {path} has {saved[name]}")


def adapter_of(path: Path) -> AdapterRecord | None:
    """The adapter record of a checkpoint; None if it contains full weights."""
    file = path / ENGINE_FILE
    return json.loads(file.read_text()).get("adapter") if file.is_file() else None


def _read_record(path: Path) -> EngineRecord:
    file = path / ENGINE_FILE
    with convert_read_errors(path):
        record: EngineRecord = json.loads(file.read_text())
    if (saved := record.get("format")) != _FORMAT:
        raise UserError(f"{file}: checkpoint format {saved}, this version reads {_FORMAT}")
    return record


def _optimizer_tree(slots: Sequence[Slot], sharded: dict[str, Sharded], *, for_load: bool) -> dict[str, Sharded]:
    """The optimizer's tensors, sharded like their parameters."""
    parameters = {id(value.data): value for value in nested_values(sharded) if isinstance(value, ShardedTensor | ShardedTensorFactory)}
    tree = {}
    for number, slot in enumerate(slots):
        parameter = parameters[id(slot.parameter)]
        for kind in slot.kinds:
            tree[f"{number}.{kind}"] = _shard_like(parameter, f"optimizer.{kind}.{parameter.key}", _slot_data(slot, kind, for_load))
    return tree


def _slot_data(slot: Slot, kind: str, for_load: bool) -> Tensor:
    if slot.group is None:
        return slot.tensors[kind]
    # In host memory, because the unsharded state may not fit on the GPU.
    return torch.empty(slot.parameter.shape) if for_load else slot.unsharded(kind).cpu()


def _shard_like(parameter: Sharded, key: str, data: Tensor) -> Sharded:
    if isinstance(parameter, ShardedTensorFactory):
        return replace(parameter, key=key, data=data)
    return replace(parameter, key=key, data=data, dtype=data.dtype)


def _check_fit(path: Path, tree: ShardedTree) -> None:
    """Raise UserError if the tensors of all ranks together differ in names or shapes from those in the checkpoint."""
    saved = {name: tuple(tensor.global_shape) for name, tensor in tensors_in(path).items()}
    factories_applied = {section: dict(tensors) for section, tensors in tree.items()}
    apply_factories(factories_applied)
    local = {
        value.key: _ignore_vocab_padding(tuple(value.global_shape), saved.get(value.key))
        if value.allow_shape_mismatch
        else tuple(value.global_shape)
        for value in nested_values(factories_applied)
        if isinstance(value, ShardedTensor)
    }
    rank_shapes: list[dict[str, tuple[int, ...]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(rank_shapes, local)
    expected = {name: shape for shapes in rank_shapes for name, shape in shapes.items()}
    differences = [
        f"{name}: saved with shape {saved[name]}, expected {shape}" for name, shape in expected.items() if saved.get(name, shape) != shape
    ]
    missing = [name for name in expected if name not in saved]
    differences += [f"{name}: not saved" for name in missing]
    differences += [f"{name}: saved, but not in the model" for name in saved if name not in expected and not name.startswith("optimizer.")]
    if missing and len(missing) == len(differences) and all(name.startswith("optimizer.") for name in missing):
        raise UserError(
            f"{path}: its optimizer lacks {len(missing)} tensor(s) that this run needs, such as {missing[0].removeprefix('optimizer.')}; "
            "use the saved run's train.rl.train_mtp and train.precision, or start in another run_dir"
        )
    if differences:
        more = f" and {len(differences) - 6} more" if len(differences) > 6 else ""
        raise UserError(f"{path} is a checkpoint of another model: {'; '.join(differences[:6])}{more}")


def _ignore_vocab_padding(expected: tuple[int, ...], saved: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return `saved` if both shapes differ only in the rows that pad a vocabulary for tp, else `expected`."""
    if saved is not None and saved[1:] == expected[1:] and abs(saved[0] - expected[0]) < _MAX_TP:
        return saved
    return expected
