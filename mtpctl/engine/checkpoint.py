"""Checkpoints through megatron-core's distributed format: any layout writes, any layout reads.

A checkpoint is a folder: the shards and their metadata, and `engine.json` with step counts and the caller's state. It is
written beside its place and renamed, so that a folder under its own name is whole; which one a run takes up is said by
the file `latest` next to it, which moves last.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory, apply_factories
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.transformer import MegatronModule

from mtpctl.compat import checkpoint_queue
from mtpctl.engine.optimizer_state import Slot, set_step, slots
from mtpctl.recipe import UserError

_ENGINE = "engine.json"
_LATEST = "latest"
_FORMAT = 1
_MOST_RANKS = 64
"""Over which a vocabulary may be divided."""


def save(path: Path, model: MegatronModule, optimizer: ChainedOptimizer | None, steps: int, state: dict[str, Any]) -> None:
    """Write model, optimizer and `state` (what JSON can hold) to `path`, replacing what is there. All ranks call together."""
    checkpoint_queue.install()
    aside = path.with_name(path.name + ".partial")
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    dist.barrier()
    tree = {"model": model.sharded_state_dict()}
    if optimizer is not None:
        tree["optimizer"] = _optimizer_tree(model, optimizer, tree["model"], reading=False)
    dist_checkpointing.save(tree, str(aside))
    if first:
        write_record(aside, steps=steps, optimizer=optimizer is not None, state=state)
        _flush(aside)
        shutil.rmtree(path, ignore_errors=True)
        aside.rename(path)
        _flush(path.parent)
    dist.barrier()


def write_record(folder: Path, *, steps: int, optimizer: bool, state: dict[str, Any]) -> None:
    """Write what `restore` reads beside the shards: the optimizer's step count, and the caller's state."""
    (folder / _ENGINE).write_text(json.dumps({"format": _FORMAT, "steps": steps, "optimizer": optimizer, "state": state}))


def restore(path: Path, model: MegatronModule, optimizer: ChainedOptimizer | None) -> tuple[int, dict[str, Any]]:
    """Load `path` into model and, where there is one, optimizer. Returns the optimizer's step count and the caller's state.

    Raises UserError, before anything is overwritten, where the folder is not a whole checkpoint, or is one of another model.
    """
    record = _record(path)
    tree = {"model": model.sharded_state_dict()}
    if optimizer is not None:
        if not record["optimizer"]:
            raise UserError(f"{path} was saved without an optimizer; it holds weights alone")
        tree["optimizer"] = _optimizer_tree(model, optimizer, tree["model"], reading=True)
    _check_fit(path, tree)
    loaded = dist_checkpointing.load(tree, str(path))
    model.load_state_dict(loaded["model"], strict=False)
    if optimizer is not None:
        for number, slot in enumerate(slots(model, optimizer)):
            for kind in slot.kinds:
                slot.fill(kind, loaded["optimizer"][f"{number}.{kind}"])
        set_step(optimizer, record["steps"])
    return record["steps"], record["state"]


def publish_checkpoint(path: Path, *, keep: int) -> None:
    """Make `path` the one that `latest_checkpoint` finds, and drop all but the `keep` newest beside it."""
    pointer = path.parent / _LATEST
    aside = pointer.with_name(_LATEST + ".partial")
    aside.write_text(path.name)
    os.replace(aside, pointer)
    _flush(path.parent)
    others = [p for p in path.parent.iterdir() if (p / _ENGINE).is_file() and p.name != path.name and not p.name.endswith(".partial")]
    others.sort(key=lambda p: (p / _ENGINE).stat().st_mtime_ns, reverse=True)
    for old in others[keep - 1 :]:
        shutil.rmtree(old)


def latest_checkpoint(root: Path) -> Path | None:
    """The checkpoint that `publish_checkpoint` named last in `root`, None where there is none.

    Raises UserError where it is gone or not whole.
    """
    pointer = root / _LATEST
    if not pointer.is_file():
        return None
    path = root / pointer.read_text().strip()
    _record(path)
    return path


def _record(path: Path) -> dict[str, Any]:
    file = path / _ENGINE
    if not file.is_file() or not dist_checkpointing.check_is_distributed_checkpoint(str(path)):
        raise UserError(f"{path} is not a whole checkpoint; name another, or remove {path.parent / _LATEST} to start anew")
    record: dict[str, Any] = json.loads(file.read_text())
    if record["format"] != _FORMAT:
        raise UserError(f"{file}: checkpoint format {record['format']}, this version reads {_FORMAT}")
    return record


def _optimizer_tree(model: torch.nn.Module, optimizer: ChainedOptimizer, sharded: dict[str, Any], *, reading: bool) -> dict[str, Any]:
    """The optimizer's tensors, cut over ranks as the parameters they belong to."""
    places = {id(value.data): value for value in nested_values(sharded) if isinstance(value, ShardedTensor | ShardedTensorFactory)}
    tree = {}
    for number, slot in enumerate(slots(model, optimizer)):
        place = places[id(slot.parameter)]
        for kind in slot.kinds:
            tree[f"{number}.{kind}"] = _like(place, f"optimizer.{kind}.{place.key}", _data(slot, kind, reading))
    return tree


def _data(slot: Slot, kind: str, reading: bool) -> torch.Tensor:
    if slot.group is None:
        return slot.tensors[kind]
    # Gathered in host memory: on a card there may be no room for what was spread over the group.
    return torch.empty(slot.parameter.shape) if reading else slot.whole(kind).cpu()


def _like(place: ShardedTensor | ShardedTensorFactory, key: str, data: torch.Tensor) -> ShardedTensor | ShardedTensorFactory:
    if isinstance(place, ShardedTensorFactory):
        return replace(place, key=key, data=data)
    return replace(place, key=key, data=data, dtype=data.dtype)


def _check_fit(path: Path, tree: dict[str, Any]) -> None:
    """Compare names and shapes over all ranks with those in the checkpoint."""
    saved = {name: tuple(tensor.global_shape) for name, tensor in dist_checkpointing.load_tensors_metadata(str(path)).items()}
    flat = {section: dict(tensors) for section, tensors in tree.items()}
    apply_factories(flat)
    mine = {
        value.key: _unpadded(tuple(value.global_shape), saved.get(value.key)) if value.allow_shape_mismatch else tuple(value.global_shape)
        for value in nested_values(flat)
        if isinstance(value, ShardedTensor)
    }
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    wanted = {name: shape for part in parts for name, shape in part.items()}
    differ = [f"{name}: {saved[name]} saved, {shape} wanted" for name, shape in wanted.items() if saved.get(name, shape) != shape]
    differ += [f"{name}: not saved" for name in wanted if name not in saved]
    differ += [f"{name}: saved, not wanted" for name in saved if name not in wanted and not name.startswith("optimizer.")]
    if differ:
        more = f" and {len(differ) - 6} more" if len(differ) > 6 else ""
        raise UserError(f"{path} is a checkpoint of another model: {'; '.join(differ[:6])}{more}")


def _unpadded(wanted: tuple[int, ...], saved: tuple[int, ...] | None) -> tuple[int, ...]:
    """`saved` where the two differ by no more than the rows that make a vocabulary divide over tp."""
    if saved is not None and saved[1:] == wanted[1:] and abs(saved[0] - wanted[0]) < _MOST_RANKS:
        return saved
    return wanted


def _flush(folder: Path) -> None:
    """A rename is not on disk before its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
