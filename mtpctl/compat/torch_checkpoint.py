"""Makes torch 2.13.0 read distributed checkpoints without running code from them.

torch reads `.metadata` with `pickle.load`, and non-tensor objects with `torch.load(weights_only=False)`. Both can run code from the file,
and a checkpoint may come from an untrusted source. With this patch, `.metadata` is read with our allow-list, and objects are read with
torch's.
"""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from mtpctl.compat import require_release

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.checkpoint.planner import ReadItem

RELEASE = "2.13.0"


class Unpickler(Protocol):
    """Reads a `.metadata` file. `resolve` returns the object for a module and a name."""

    def __init__(self, file: IO[bytes], path: Path, resolve: Callable[[str, str], object]) -> None: ...

    def load(self) -> object: ...


def install(unpickler: type[Unpickler]) -> None:
    """Make torch read `.metadata` with this unpickler. Idempotent. Raises RuntimeError for another release of torch."""
    require_release("torch", RELEASE, __name__)

    def read_metadata(self: FileSystemReader, *args: object, **kwargs: object) -> Metadata:
        path = Path(self._get_metadata_path(kwargs.get("rank")))  # type: ignore[arg-type]
        with path.open("rb") as file:
            metadata = unpickler(file, path, lambda module, name: getattr(importlib.import_module(module), name)).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(f"{path} holds no metadata")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    FileSystemReader.read_metadata = read_metadata  # type: ignore[method-assign]
    DefaultLoadPlanner.load_bytes = _load_bytes  # type: ignore[method-assign]


def _load_bytes(self: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
    name, loaded = read_item.dest_index.fqn, torch.load(value, weights_only=True)
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[name], loaded)
    else:
        self.state_dict[name] = loaded
