"""Weight files read tensor by tensor: safetensors mapped into memory, pickled ones opened with `weights_only=True`.

Headers are checked before a byte of weights is used, and errors name file, tensor and byte. Tensors are views of the mapped file, so that
they take no anonymous memory until something copies them.
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

if TYPE_CHECKING:
    import torch
    from torch import Tensor
if TYPE_CHECKING:
    from torch import Tensor

SIZES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
"""Bytes of an element, by safetensors' name of its type."""

PICKLED = (".bin", ".pt", ".pth")

_LENGTH_BYTES = 8
_POINTER = b"version https://git-lfs"
_LARGEST_HEADER = 100_000_000


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a weight file.

    `code`: safetensors' name of its type. `start`: the byte in the file where its data begins; None in pickled files.
    """

    file: Path
    name: str
    code: str
    shape: tuple[int, ...]
    start: int | None

    @property
    def dtype(self) -> torch.dtype:
        from mtpctl.convert.dtypes import DTYPES

        return DTYPES[self.code]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * SIZES[self.code]


def entries(file: Path) -> dict[str, Entry]:
    """What a weight file holds. Raises UserError with file, tensor and byte where it is damaged."""
    if file.suffix not in PICKLED:
        return _safetensors_entries(file)
    from mtpctl.convert.dtypes import CODES

    return {name: Entry(file, name, CODES[value.dtype], tuple(value.shape), None) for name, value in _unpickled(file).items()}


def check_fetched(file: Path) -> None:
    """Raise UserError for a pointer of Git LFS, which a clone without LFS leaves in place of a large file."""
    with file.open("rb") as stream:
        if stream.read(len(_POINTER)) == _POINTER:
            raise UserError(f"{file}: is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`, or download the model again")


def _safetensors_entries(file: Path) -> dict[str, Entry]:
    size = file.stat().st_size
    check_fetched(file)
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _LARGEST_HEADER):
            raise UserError(f"{file}: byte 0: announces a header of {length} bytes in a file of {size}; the file is cut or no safetensors")
        text = stream.read(length)
    try:
        header = json.loads(text)
        assert isinstance(header, dict)
    except (ValueError, AssertionError) as error:
        at = _LENGTH_BYTES + getattr(error, "pos", getattr(error, "start", 0))
        raise UserError(f"{file}: byte {at}: the header is not valid JSON; the file is damaged") from error
    first = _LENGTH_BYTES + length
    header.pop("__metadata__", None)
    found = {name: _entry(file, name, entry, first) for name, entry in header.items()}
    end = first
    for entry in sorted(found.values(), key=lambda each: (each.start or 0, each.nbytes)):
        if entry.start != end:
            raise UserError(f"{file}: {entry.name}: its data is said to begin at byte {entry.start}, the one before it ends at {end}")
        end += entry.nbytes
        if end > size:
            raise UserError(f"{file}: {entry.name}: its data ends at byte {end}, the file at {size}; the file is cut, fetch it again")
    if end != size:
        raise UserError(f"{file}: byte {end}: {size - end} bytes follow the last tensor; the file is damaged")
    return found


def _entry(file: Path, name: str, header: object, first: int) -> Entry:
    try:
        if not isinstance(header, dict):
            raise TypeError("not an object")
        code, shape = header["dtype"], tuple(int(n) for n in header["shape"])
        SIZES[code]
        begin, end = (int(n) for n in header["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file}: {name}: its header entry {json.dumps(header)[:120]} cannot be read") from error
    entry = Entry(file, name, code, shape, first + begin)
    if end - begin != entry.nbytes or begin < 0 or min(shape, default=0) < 0:
        raise UserError(
            f"{file}: {name}: byte {first + begin}: {end - begin} bytes for {header['dtype']} {list(shape)}, which takes {entry.nbytes}"
        )
    return entry


def _unpickled(file: Path) -> dict[str, Tensor]:
    """The tensors of a pickled file; no code in it is run."""
    import torch

    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        why = " ".join(str(error).split())[:160]
        raise UserError(f"{file}: not readable as pickled tensors alone ({why}); convert it to safetensors where it came from") from error
    state = state.get("state_dict", state) if isinstance(state, dict) else state
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UserError(f"{file}: holds other things than named tensors; convert it to safetensors where it came from")
    return state


class TensorFiles:
    """Tensors of weight files, which are mapped when first asked for."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}
        self._states: dict[Path, dict[str, Tensor]] = {}

    def tensor(self, entry: Entry) -> Tensor:
        """A view of the file; it must not be written to."""
        import torch

        if entry.start is None:
            if entry.file not in self._states:
                self._states[entry.file] = _unpickled(entry.file)
            return self._states[entry.file][entry.name]
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=entry.dtype)
        if entry.file not in self._maps:
            with entry.file.open("rb") as stream:
                self._maps[entry.file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            # A larger window of reading ahead: without it a file that is not in the page cache comes at two thirds of the speed.
            self._maps[entry.file].madvise(mmap.MADV_SEQUENTIAL)
        with warnings.catch_warnings():
            # torch has no read-only tensors and says so.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(self._maps[entry.file], dtype=entry.dtype, count=prod(entry.shape), offset=entry.start)
        return flat.view(entry.shape)


# All weights of a Hugging Face folder under the names they have there: one file, or shards with an index.

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


class FolderWeights:
    """Names, shapes and tensors of a folder. Raises UserError for shards that are missing, damaged or outside the folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = TensorFiles()
        index = _index(path)
        self.files = _single(path) if index is None else _listed(index)
        self.entries: dict[str, Entry] = {}
        for file in self.files:
            for name, entry in entries(file).items():
                if name in self.entries:
                    raise UserError(f"{path}: {name} is both in {self.entries[name].file.name} and in {file.name}; remove one of them")
                self.entries[name] = entry
        if index is not None:
            for name, file_name in json.loads(index.read_text())["weight_map"].items():
                if name not in self.entries:
                    raise UserError(f"{index}: {name} is listed in {file_name}, which does not hold it; fetch that file again")

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def tensor(self, name: str) -> Tensor:
        """A view of the file that holds it."""
        return self._files.tensor(self.entries[name])

    @cached_property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())


def _index(path: Path) -> Path | None:
    """The index of safetensors; that of pickled shards only without any safetensors, since it may have come without its shards."""
    safe, pickled = (path / name for name in INDEXES)
    if safe.is_file():
        return safe
    return pickled if pickled.is_file() and not any(path.glob("*.safetensors")) else None


def _single(path: Path) -> list[Path]:
    """Without an index: all safetensors files, or where there are none the pickled one."""
    found = sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin")) or sorted(path.glob("*.pt"))
    if not found:
        raise UserError(f"{path}: holds no weights (*.safetensors, pytorch_model*.bin)")
    return found


def _listed(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{index}: is no index of weights (a JSON object with weight_map)") from error
    for name in names:
        if not isinstance(name, str) or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
            raise UserError(f"{index}: {name!r} leads out of the folder; an index may name files of its own folder alone")
    missing = sorted(name for name in names if not (index.parent / name).is_file())
    if missing:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise UserError(f"{index}: lists {', '.join(missing[:4])}{more}, which {index.parent} lacks; fetch what is missing")
    return sorted(index.parent / name for name in names)
