"""Writes a folder's safetensors files in any order of tensors, optionally in FP8. The offset of every tensor is computed in advance.

The files are allocated first, so that a full disk is detected immediately. Each tensor is then written at its offset; an expert is written
into its slice of a packed tensor in the same way. FP8 weights have DeepSeek's format, as vLLM reads it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mtpctl.convert.model_weights import Stored
from mtpctl.errors import UserError
from mtpctl.families.quantization import FP8_BLOCK, SCALE, fp8_config, fp8_names, scale_shape
from mtpctl.families.reading import DRAFTER
from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import tensor_shapes
from mtpctl.kernels.block_fp8 import quantized_tensors

SHARD_BYTES = 5_000_000_000
"""Maximum size of a file, as on the Hugging Face hub. A file with a single tensor may be larger."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Values of `--dtype`."""
_LENGTH_BYTES = 8
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Location:
    """The file and byte range of a tensor."""

    file: str
    start: int
    nbytes: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Shard:
    """One file: its name, header and size in bytes."""

    name: str
    header: bytes
    nbytes: int


class HfWriter:
    """Writes the weight files of `folder` according to `layout`. sizes: number of elements of each of the model's tensors."""

    def __init__(
        self, folder: Path, layout: list[Stored], sizes: Mapping[str, int], *, stem: str = "model", shard_bytes: int = SHARD_BYTES
    ) -> None:
        self.folder = folder
        self.locations: dict[str, list[Location]] = {}
        """Keyed by the name of the model's tensor, or by the stored name of a tensor outside the language model."""
        self.shards: list[Shard] = []
        self._weight_map: dict[str, str] = {}
        self._files: dict[str, int] = {}
        self._total = sum(stored.nbytes for stored in layout)
        drafter = [stored for stored in layout if stored.name.startswith(f"{DRAFTER}.")]
        if drafter:
            self._add_shard(f"{DRAFTER}/model.safetensors", drafter, sizes)
            layout = [stored for stored in layout if stored not in drafter]
        groups = list(_groups(layout, shard_bytes))
        for number, group in enumerate(groups, start=1):
            name = f"{stem}.safetensors" if len(groups) == 1 else f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors"
            self._add_shard(name, group, sizes)

    def _add_shard(self, file: str, group: list[Stored], sizes: Mapping[str, int]) -> None:
        header, offset = {}, 0
        for stored in group:
            name = stored.name.removeprefix(f"{DRAFTER}.")
            header[name] = {"dtype": stored.code, "shape": list(stored.shape), "data_offsets": [offset, offset + stored.nbytes]}
            offset += stored.nbytes
        text = json.dumps({"__metadata__": {"format": "pt"}} | header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self.shards.append(Shard(file, len(text).to_bytes(_LENGTH_BYTES, "little") + text, _LENGTH_BYTES + len(text) + offset))
        offset = _LENGTH_BYTES + len(text)
        for stored in group:
            if not file.startswith(f"{DRAFTER}/"):
                self._weight_map[stored.name] = file
            end = offset + stored.nbytes
            for name in stored.pieces or (stored.name,):
                nbytes = sizes[name] * stored.dtype.itemsize if len(stored.pieces) > 1 else stored.nbytes
                self.locations.setdefault(name, []).append(Location(file, offset, nbytes, stored.dtype))
                offset += nbytes
            assert offset == end, f"{stored.name}: its pieces end at {offset} and not at {end}"

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    def allocate(self) -> None:
        """Create the files with their headers, and the index."""
        for shard in self.shards:
            (self.folder / shard.name).parent.mkdir(exist_ok=True)
            with (self.folder / shard.name).open("wb") as stream:
                os.posix_fallocate(stream.fileno(), 0, shard.nbytes)
                stream.write(shard.header)
        if len(set(self._weight_map.values())) > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": self._weight_map}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def put(self, name: str, tensor: Tensor) -> None:
        """Write a tensor to all its locations, in the dtype of each."""
        for location in self.locations[name]:
            data = tensor.to(location.dtype).contiguous()
            assert data.nbytes == location.nbytes, f"{name}: {data.nbytes} bytes for a location of {location.nbytes}"
            if data.nbytes:
                view = memoryview(np.asarray(data.view(-1).view(torch.uint8)))
                _write_all(self._file(location.file), view, location.start)

    def flush(self) -> None:
        """Flush the data written so far to disk. Another thread may write and open files concurrently."""
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
    nbytes = 0
    for stored in layout:
        if group and nbytes + stored.nbytes > shard_bytes:
            yield group
            group, nbytes = [], 0
        group.append(stored)
        nbytes += stored.nbytes
    if group:
        yield group


def _write_all(handle: int, view: memoryview, offset: int) -> None:
    while view:
        written = os.pwrite(handle, view, offset)
        view, offset = view[written:], offset + written


def main_dtype(dtypes: Mapping[str, torch.dtype], sizes: Mapping[str, int]) -> torch.dtype:
    """The dtype of the most elements. sizes: number of elements by name."""
    counts: dict[torch.dtype, int] = {}
    for name, dtype in dtypes.items():
        counts[dtype] = counts.get(dtype, 0) + sizes[name]
    return max(counts, key=counts.__getitem__)


def cast_dtypes(
    dtypes: Mapping[str, torch.dtype],
    sizes: Mapping[str, int],
    target: torch.dtype | None,
    *,
    folder_dtypes: Mapping[str, torch.dtype] | None = None,
) -> dict[str, torch.dtype]:
    """Replace floating-point dtypes by `target`; unchanged if `target` is None.

    If the folder's main dtype is narrower than fp32, the tensors that it stores in fp32 (a router's bias, a decay) remain fp32.
    folder_dtypes: the folder's dtypes (default: `dtypes`).
    """
    if target is None:
        return dict(dtypes)
    folder_dtypes = folder_dtypes or dtypes
    stored_fp32 = torch.float32 if main_dtype(folder_dtypes, sizes).itemsize < torch.float32.itemsize else None
    return {
        name: dtype if not dtype.is_floating_point or (folder_dtypes.get(name) == stored_fp32 == dtype) else target
        for name, dtype in dtypes.items()
    }


def common_dtype(dtypes: Mapping[str, torch.dtype], names: tuple[str, ...]) -> torch.dtype:
    """The narrowest dtype that represents the values of all the named tensors exactly."""
    return reduce(torch.promote_types, (dtypes[name] for name in names))


FP8 = "fp8"
"""Value of `--dtype`."""
_VALUES, _SCALES = "F8_E4M3", "F32"
"""Dtype codes of FP8 matrices and of their scales."""


def names_to_quantize(shape: ModelShape, written: Iterable[str]) -> frozenset[str]:
    """The matrices to quantize among those that are `written`. Raises UserError if there are none."""
    names = fp8_names(shape) & frozenset(written)
    if not names:
        raise UserError(
            f"--dtype fp8: no matrix of this {shape.family} model fits the engines' blocks of {FP8_BLOCK} x {FP8_BLOCK} "
            f"(hidden size {shape.hidden}, MLP {shape.ffn}); write it in another dtype"
        )
    return names


def fp8_layout(layout: list[Stored], names: frozenset[str], shape: ModelShape) -> list[Stored]:
    """The layout with the named matrices in FP8, each followed by its scales. Packed experts are stored one by one, as published."""
    sizes = tensor_shapes(shape)
    result = []
    for stored in layout:
        if not names.issuperset(stored.pieces) or not stored.pieces:
            result.append(stored)
            continue
        for piece in stored.pieces:
            name = stored.name
            if len(stored.pieces) > 1 or ".experts." in piece:
                name = stored.name.partition(".experts.")[0] + ".experts." + piece.partition(".experts.")[2]
            rows, columns = sizes[piece]
            result.append(Stored(name, _VALUES, (rows, columns), (piece,)))
            result.append(Stored(name + SCALE, _SCALES, scale_shape(rows, columns), (piece + SCALE,)))
    return result


def written_tensors(tensors: Mapping[str, Tensor], names: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors to write: values and scales of those to quantize, others unchanged."""
    for name, tensor in tensors.items():
        if name in names:
            yield from quantized_tensors(name, tensor)
        else:
            yield name, tensor


def quantization_config(shape: ModelShape, names: frozenset[str], layout: list[Stored]) -> dict[str, object]:
    """The `quantization_config` of config.json. Linear layers outside the language model (a vision tower) are not quantized."""
    linear = (each for each in layout if not each.pieces and each.name.endswith(".weight") and len(each.shape) == 2)
    return fp8_config(shape, names, [each.name.removesuffix(".weight") for each in linear])
