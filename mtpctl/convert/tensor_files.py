"""The weights of a Hugging Face folder under their stored names: memory-mapped safetensors, or pickles read with `weights_only=True`.

Headers are checked before any weights are read, and errors name file, tensor and byte. Tensors are views of the mapped file, so they are
not loaded into memory until they are read. Importing this module does not import torch.
"""

from __future__ import annotations

import json
import mmap
import pickle
import warnings
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from mtpctl.errors import UserError
from mtpctl.families.reading import DRAFTER

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ELEMENT_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
"""Bytes per element, by safetensors' dtype code."""
_DTYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8"},
    **{"U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool"},
}
"""Names of torch's dtypes, by safetensors' dtype code."""
_CODES = {name: code for code, name in _DTYPES.items()}

INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth")
_LENGTH_BYTES = 8
_LFS_POINTER = b"version https://git-lfs"
_MAX_HEADER_BYTES = 100_000_000


def dtype_of(code: str) -> torch.dtype:
    import torch

    return getattr(torch, _DTYPES[code])


def code_of(dtype: torch.dtype) -> str:
    return _CODES[str(dtype).removeprefix("torch.")]


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a weight file. code: safetensors' dtype code; start: offset of its data in the file, None in pickles."""

    file: Path
    name: str
    code: str
    shape: tuple[int, ...]
    start: int | None

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.code)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ELEMENT_BYTES[self.code]


class FolderWeights:
    """Names, shapes and tensors of a model folder, from one weight file or several shards.

    Includes the tensors of a drafter in the subfolder `drafter`, with the prefix `drafter.`.

    Raises UserError if shards are missing, damaged or outside the folder.
    """

    def __init__(self, path: Path) -> None:
        self._maps: dict[Path, mmap.mmap] = {}
        self._pickles: dict[Path, dict[str, Tensor]] = {}
        index = _find_index(path)
        self.files = _list_weight_files(path) if index is None else _read_index(index)
        self.entries: dict[str, Entry] = {}
        for file in self.files:
            for name, entry in _read_entries(file).items():
                if name in self.entries:
                    raise UserError(f"{path}: {name} is both in {self.entries[name].file.name} and in {file.name}; remove one of them")
                self.entries[name] = entry
        if (path / DRAFTER / "config.json").is_file():
            drafter = FolderWeights(path / DRAFTER)
            self.files = [*self.files, *drafter.files]
            self.entries |= {f"{DRAFTER}.{name}": entry for name, entry in drafter.entries.items()}
        if index is not None:
            for name, file_name in json.loads(index.read_text())["weight_map"].items():
                if name not in self.entries:
                    raise UserError(f"{index}: {name} is listed in {file_name}, which does not contain it; fetch that file again")

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    @cached_property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())

    def tensor(self, name: str) -> Tensor:
        """The tensor as a read-only view of its file. Files are mapped on first use."""
        import torch

        entry = self.entries[name]
        if entry.start is None:
            if entry.file not in self._pickles:
                self._pickles[entry.file] = _load_pickle(entry.file)
            return self._pickles[entry.file][entry.name]
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=entry.dtype)
        if entry.file not in self._maps:
            with entry.file.open("rb") as stream:
                self._maps[entry.file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            # Enlarges the read-ahead window: a file that is not in the page cache is read 1.5 times as fast.
            self._maps[entry.file].madvise(mmap.MADV_SEQUENTIAL)
        with warnings.catch_warnings():
            # torch warns because it has no read-only tensors.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            elements = torch.frombuffer(self._maps[entry.file], dtype=entry.dtype, count=prod(entry.shape), offset=entry.start)
        return elements.view(entry.shape)


def _find_index(path: Path) -> Path | None:
    """The index of the safetensors shards, or of the pickled shards if the folder has no safetensors; None without an index."""
    safetensors_index, pickle_index = (path / name for name in INDEX_FILES)
    if safetensors_index.is_file():
        return safetensors_index
    return pickle_index if pickle_index.is_file() and not any(path.glob("*.safetensors")) else None


def _list_weight_files(path: Path) -> list[Path]:
    """All safetensors files, or all pickles if there are none. Raises UserError if there are no weights."""
    files = sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin")) or sorted(path.glob("*.pt"))
    if not files:
        raise UserError(f"{path}: contains no weights (*.safetensors, pytorch_model*.bin)")
    return files


def _read_index(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{index}: is not an index of weights (a JSON object with weight_map)") from error
    for name in names:
        if not isinstance(name, str) or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
            raise UserError(f"{index}: {name!r} leads out of the folder; an index may only name files in its folder")
    missing = sorted(name for name in names if not (index.parent / name).is_file())
    if missing:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise UserError(f"{index}: lists {', '.join(missing[:4])}{more}, which are missing in {index.parent}; fetch them")
    return sorted(index.parent / name for name in names)


def _read_entries(file: Path) -> dict[str, Entry]:
    """The tensors of a weight file. Raises UserError with file, tensor and byte if it is damaged."""
    if file.suffix not in _PICKLE_SUFFIXES:
        return _read_safetensors_header(file)
    return {name: Entry(file, name, code_of(value.dtype), tuple(value.shape), None) for name, value in _load_pickle(file).items()}


def check_fetched(file: Path) -> None:
    """Raise UserError if the file is a Git LFS pointer, as in a clone without Git LFS."""
    with file.open("rb") as stream:
        if stream.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise UserError(f"{file}: is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`, or download the model again")


def _read_safetensors_header(file: Path) -> dict[str, Entry]:
    size = file.stat().st_size
    check_fetched(file)
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            raise UserError(f"{file}: byte 0: states a header of {length} bytes in a file of {size}; it is truncated or not safetensors")
        header_text = stream.read(length)
    try:
        header = json.loads(header_text)
        assert isinstance(header, dict)
    except (ValueError, AssertionError) as error:
        error_byte = _LENGTH_BYTES + getattr(error, "pos", getattr(error, "start", 0))
        raise UserError(f"{file}: byte {error_byte}: the header is not valid JSON; the file is damaged") from error
    data_start = _LENGTH_BYTES + length
    header.pop("__metadata__", None)
    entries = {name: _parse_entry(file, name, entry, data_start) for name, entry in header.items()}
    end = data_start
    for entry in sorted(entries.values(), key=lambda item: (item.start or 0, item.nbytes)):
        if entry.start != end:
            raise UserError(f"{file}: {entry.name}: its data begins at byte {entry.start}, but the previous tensor ends at {end}")
        end += entry.nbytes
        if end > size:
            raise UserError(f"{file}: {entry.name}: its data ends at byte {end}, but the file at {size}; fetch it again")
    if end != size:
        raise UserError(f"{file}: byte {end}: {size - end} bytes follow the last tensor; the file is damaged")
    return entries


def _parse_entry(file: Path, name: str, header: object, data_start: int) -> Entry:
    try:
        if not isinstance(header, dict):
            raise TypeError("not an object")
        code, shape = header["dtype"], tuple(int(n) for n in header["shape"])
        ELEMENT_BYTES[code]  # raises KeyError for an unknown dtype
        begin, end = (int(n) for n in header["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file}: {name}: its header entry {json.dumps(header)[:120]} cannot be read") from error
    entry = Entry(file, name, code, shape, data_start + begin)
    if end - begin != entry.nbytes or begin < 0 or min(shape, default=0) < 0:
        raise UserError(
            f"{file}: {name}: byte {data_start + begin}: {end - begin} bytes for {header['dtype']} {list(shape)}, not {entry.nbytes}"
        )
    return entry


def _load_pickle(file: Path) -> dict[str, Tensor]:
    """The tensors of a pickle. Code in the pickle is not run."""
    import torch

    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(
            f"{file}: not readable as a pickle of tensors only ({reason}); convert it to safetensors with the program that wrote it"
        ) from error
    state = state.get("state_dict", state) if isinstance(state, dict) else state
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UserError(f"{file}: contains more than named tensors; convert it to safetensors with the program that wrote it")
    return state
