"""A folder's safetensors written tensor by tensor, in any order: every place is known before the first byte.

The shards are laid out and allocated first, so that a disk that is too small is found at once, and each tensor is then written to its
place. An expert is written to its part of a packed tensor in the same way.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mtpctl.convert.model_weights import Stored

SHARD_BYTES = 5_000_000_000
"""Bytes of a file at most, as on the Hugging Face hub; a single tensor may be larger."""

_LENGTH_BYTES = 8
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor's bytes go."""

    file: str
    start: int
    nbytes: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Shard:
    """One file: its header, and its size in bytes."""

    name: str
    header: bytes
    nbytes: int


class HfWriter:
    """The weight files of `folder`, for tensors stored as in `layout`. `sizes`: how many elements each of the model's tensors has."""

    def __init__(
        self, folder: Path, layout: list[Stored], sizes: Mapping[str, int], *, stem: str = "model", shard_bytes: int = SHARD_BYTES
    ) -> None:
        self.folder = folder
        self.places: dict[str, list[Place]] = {}
        """By the model's name; a carried tensor's own."""
        self.shards: list[Shard] = []
        self._weight_map: dict[str, str] = {}
        self._files: dict[str, int] = {}
        self.total = sum(stored.nbytes for stored in layout)
        groups = list(_groups(layout, shard_bytes))
        for number, group in enumerate(groups, start=1):
            name = f"{stem}.safetensors" if len(groups) == 1 else f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors"
            self._place(name, group, sizes)

    def _place(self, file: str, group: list[Stored], sizes: Mapping[str, int]) -> None:
        header, at = {}, 0
        for stored in group:
            header[stored.name] = {"dtype": stored.code, "shape": list(stored.shape), "data_offsets": [at, at + stored.nbytes]}
            at += stored.nbytes
        text = json.dumps({"__metadata__": {"format": "pt"}} | header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self.shards.append(Shard(file, len(text).to_bytes(_LENGTH_BYTES, "little") + text, _LENGTH_BYTES + len(text) + at))
        at = _LENGTH_BYTES + len(text)
        for stored in group:
            self._weight_map[stored.name] = file
            end = at + stored.nbytes
            for name in stored.pieces or (stored.name,):
                nbytes = sizes[name] * stored.dtype.itemsize if len(stored.pieces) > 1 else stored.nbytes
                self.places.setdefault(name, []).append(Place(file, at, nbytes, stored.dtype))
                at += nbytes
            assert at == end, f"{stored.name}: its pieces end at {at} and not at {end}"

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    def allocate(self) -> None:
        """Make the files, with their headers. Files of an interrupted conversion keep their tensors, and may still lack the header."""
        for shard in self.shards:
            path = self.folder / shard.name
            there = path.exists() and path.stat().st_size == shard.nbytes
            with path.open("r+b" if there else "wb") as stream:
                os.posix_fallocate(stream.fileno(), 0, shard.nbytes)
                stream.write(shard.header)
        if len(self.shards) > 1:
            index = {"metadata": {"total_size": self.total}, "weight_map": self._weight_map}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def put(self, name: str, tensor: Tensor) -> None:
        """Write a tensor to all its places, in the type of each."""
        for place in self.places[name]:
            data = tensor.to(place.dtype).contiguous()
            assert data.nbytes == place.nbytes, f"{name}: {data.nbytes} bytes for a place of {place.nbytes}"
            if data.nbytes:
                view = memoryview(np.asarray(data.view(-1).view(torch.uint8)))
                _write_all(self._file(place.file), view, place.start)

    def flush(self) -> None:
        """Bring everything written so far to the disk. Meanwhile another thread may write more, and open further files."""
        for handle in list(self._files.values()):
            os.fdatasync(handle)

    def close(self) -> None:
        for handle in self._files.values():
            os.close(handle)
        self._files.clear()

    def _file(self, name: str) -> int:
        if name not in self._files:
            self._files[name] = os.open(self.folder / name, os.O_WRONLY)
        return self._files[name]


def _groups(layout: list[Stored], shard_bytes: int) -> Iterator[list[Stored]]:
    group: list[Stored] = []
    held = 0
    for stored in layout:
        if group and held + stored.nbytes > shard_bytes:
            yield group
            group, held = [], 0
        group.append(stored)
        held += stored.nbytes
    if group:
        yield group


def _write_all(handle: int, view: memoryview, at: int) -> None:
    while view:
        written = os.pwrite(handle, view, at)
        view, at = view[written:], at + written
