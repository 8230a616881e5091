"""Writes a folder's safetensors files, optionally in FP8. Tensors may be written in any order, because all offsets are computed first.

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
from mtpctl.families.quantization import FP8_BLOCK, SCALE_SUFFIX, fp8_config, scale_shape, select_fp8_names
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
    """Writes the weight files of `folder` according to `layout`. num_elements: number of elements of each of the model's tensors."""

    def __init__(
        self, folder: Path, layout: list[Stored], num_elements: Mapping[str, int], *, stem: str = "model", shard_bytes: int = SHARD_BYTES
    ) -> None:
        self.folder = folder
        self.locations: dict[str, list[Location]] = {}
        """Keyed by the name of the model's tensor, or by the stored name of a tensor outside the language model."""
        self.shards: list[Shard] = []
        self._weight_map: dict[str, str] = {}
        self._files: dict[str, int] = {}
        drafter = [stored for stored in layout if stored.name.startswith(f"{DRAFTER}.")]
        if drafter:
            self._add_shard(f"{DRAFTER}/model.safetensors", drafter, num_elements)
            layout = [stored for stored in layout if stored not in drafter]
        self._total_bytes = sum(stored.nbytes for stored in layout)
        groups = list(_split_into_shards(layout, shard_bytes))
        for shard_number, tensors in enumerate(groups, start=1):
            name = f"{stem}.safetensors" if len(groups) == 1 else f"{stem}-{shard_number:05d}-of-{len(groups):05d}.safetensors"
            self._add_shard(name, tensors, num_elements)

    def _add_shard(self, file: str, tensors: list[Stored], num_elements: Mapping[str, int]) -> None:
        header, offset = {}, 0
        for stored in tensors:
            name = stored.name.removeprefix(f"{DRAFTER}.")
            header[name] = {"dtype": stored.code, "shape": list(stored.shape), "data_offsets": [offset, offset + stored.nbytes]}
            offset += stored.nbytes
        header_bytes = json.dumps({"__metadata__": {"format": "pt"}} | header, separators=(",", ":")).encode()
        header_bytes += b" " * (-len(header_bytes) % _ALIGNMENT)
        self.shards.append(
            Shard(file, len(header_bytes).to_bytes(_LENGTH_BYTES, "little") + header_bytes, _LENGTH_BYTES + len(header_bytes) + offset)
        )
        offset = _LENGTH_BYTES + len(header_bytes)
        for stored in tensors:
            if not file.startswith(f"{DRAFTER}/"):
                self._weight_map[stored.name] = file
            end = offset + stored.nbytes
            for name in stored.pieces or (stored.name,):
                nbytes = num_elements[name] * stored.dtype.itemsize if len(stored.pieces) > 1 else stored.nbytes
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
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": self._weight_map}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def put(self, name: str, tensor: Tensor) -> None:
        """Write a tensor to all its locations, in the dtype of each."""
        for location in self.locations[name]:
            data = tensor.to(location.dtype).contiguous()
            assert data.nbytes == location.nbytes, f"{name}: {data.nbytes} bytes for a location of {location.nbytes}"
            if data.nbytes:
                view = memoryview(np.asarray(data.view(-1).view(torch.uint8)))
                _write_all(self._open_file(location.file), view, location.start)

    def flush(self) -> None:
        """Flush the data written so far to disk. Another thread may write and open files concurrently."""
        for descriptor in list(self._files.values()):
            os.fdatasync(descriptor)

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _open_file(self, name: str) -> int:
        if name not in self._files:
            self._files[name] = os.open(self.folder / name, os.O_WRONLY)
        return self._files[name]


def _split_into_shards(layout: list[Stored], shard_bytes: int) -> Iterator[list[Stored]]:
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


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def main_dtype(dtypes: Mapping[str, torch.dtype], sizes: Mapping[str, int]) -> torch.dtype:
    """The dtype that most elements have. sizes: number of elements by name."""
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
    kept_dtype = torch.float32 if main_dtype(folder_dtypes, sizes).itemsize < torch.float32.itemsize else None
    return {
        name: dtype if not dtype.is_floating_point or (folder_dtypes.get(name) == kept_dtype == dtype) else target
        for name, dtype in dtypes.items()
    }


def common_dtype(dtypes: Mapping[str, torch.dtype], names: tuple[str, ...]) -> torch.dtype:
    """The narrowest dtype that represents the values of all the named tensors exactly."""
    return reduce(torch.promote_types, (dtypes[name] for name in names))


FP8 = "fp8"
"""Value of `--dtype` for matrices in FP8."""
_FP8_CODE, _SCALE_CODE = "F8_E4M3", "F32"
"""Dtype codes of FP8 matrices and of their scales."""


def select_fp8_matrices(shape: ModelShape, candidates: Iterable[str]) -> frozenset[str]:
    """The matrices among `candidates` to quantize. Raises UserError if there are none."""
    names = select_fp8_names(shape) & frozenset(candidates)
    if not names:
        raise UserError(
            f"--dtype fp8: no matrix of this {shape.family} model fits the engines' blocks of {FP8_BLOCK} x {FP8_BLOCK} "
            f"(hidden size {shape.hidden}, MLP {shape.ffn}); write it in another dtype"
        )
    return names


def make_fp8_layout(layout: list[Stored], fp8_matrices: frozenset[str], shape: ModelShape) -> list[Stored]:
    """The layout with the named matrices in FP8, each followed by its scales.

    The matrices of packed experts are stored as separate tensors, as in published checkpoints.
    """
    shapes = tensor_shapes(shape)
    result = []
    for stored in layout:
        if not fp8_matrices.issuperset(stored.pieces) or not stored.pieces:
            result.append(stored)
            continue
        for piece in stored.pieces:
            name = stored.name
            if len(stored.pieces) > 1 or ".experts." in piece:
                name = stored.name.partition(".experts.")[0] + ".experts." + piece.partition(".experts.")[2]
            rows, columns = shapes[piece]
            result.append(Stored(name, _FP8_CODE, (rows, columns), (piece,)))
            result.append(Stored(name + SCALE_SUFFIX, _SCALE_CODE, scale_shape(rows, columns), (piece + SCALE_SUFFIX,)))
    return result


def quantize_selected(tensors: Mapping[str, Tensor], fp8_matrices: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
    """Replace each of `fp8_matrices` by its FP8 values and scales. Other tensors are unchanged."""
    for name, tensor in tensors.items():
        if name in fp8_matrices:
            yield from quantized_tensors(name, tensor)
        else:
            yield name, tensor


def quantization_config(shape: ModelShape, fp8_matrices: frozenset[str], layout: list[Stored]) -> dict[str, object]:
    """The `quantization_config` of config.json. Linear layers outside the language model (a vision tower) are not quantized."""
    other_linears = (stored for stored in layout if not stored.pieces and stored.name.endswith(".weight") and len(stored.shape) == 2)
    return fp8_config(shape, fp8_matrices, [stored.name.removesuffix(".weight") for stored in other_linears])
