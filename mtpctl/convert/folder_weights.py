"""All weights of a Hugging Face folder under the names they have there: one file, or shards with an index."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from mtpctl.convert.tensor_files import Entry, TensorFiles, entries
from mtpctl.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

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
