"""Reads megatron-core checkpoints without running code from them, and reports damage in one line.

`.metadata` is a pickle, and a pickle can call any function. An allow-list admits the few torch classes that a checkpoint needs, and every
other name is rejected. Shards contain tensors and small objects, which torch reads with its own allow-list. Importing this module does not
import torch.
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING

from mtpctl.checkpoint.listing import Damaged, size_of
from mtpctl.compat import require_release
from mtpctl.errors import MtpctlError, UserError

if TYPE_CHECKING:
    import io

    from megatron.core.dist_checkpointing import ShardedTensor
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.planner import ReadItem

DCP_METADATA = ".metadata"
_METADATA_MODULE, _PLANNER_MODULE = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner"
_ALLOWED_NAMES = {
    (_METADATA_MODULE, "BytesStorageMetadata"),
    (_METADATA_MODULE, "ChunkStorageMetadata"),
    (_METADATA_MODULE, "Metadata"),
    (_METADATA_MODULE, "MetadataIndex"),
    (_METADATA_MODULE, "StorageMeta"),
    (_METADATA_MODULE, "TensorProperties"),
    (_METADATA_MODULE, "TensorStorageMetadata"),
    (_METADATA_MODULE, "_MEM_FORMAT_ENCODING"),
    (_PLANNER_MODULE, "BytesIOWriteData"),
    (_PLANNER_MODULE, "SavePlan"),
    (_PLANNER_MODULE, "TensorWriteData"),
    (_PLANNER_MODULE, "WriteItem"),
    (_PLANNER_MODULE, "WriteItemType"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("collections", "OrderedDict"),
}
_ALLOWED_DTYPES = {
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
}
"""Allowed dtypes, which are attributes of `torch` in a pickle."""
_TORCH = "2.13.0"


class RestrictedUnpickler(pickle.Unpickler):
    """Reads a `.metadata` file. `load` raises UserError for a name that is not allowed.

    resolve: returns the object for an allowed module and name.
    """

    def __init__(self, file: IO[bytes], path: Path, resolve: Callable[[str, str], object]) -> None:
        super().__init__(file)
        self._path, self._resolve = path, resolve

    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _ALLOWED_NAMES or (module == "torch" and name in _ALLOWED_DTYPES):
            return self._resolve(module, name)
        raise UserError(
            f"{self._path}: contains {module}.{name}, which no checkpoint needs and which may run code; do not use this checkpoint; "
            "get it again from a source that you trust"
        )


class _Record:
    """Placeholder for a torch object with its state."""

    def __init__(self, *_: object) -> None:
        self.state: dict[str, object] = {}

    def __setstate__(self, state: object) -> None:
        self.state = state if isinstance(state, dict) else {}


def shard_sizes(checkpoint: Path) -> dict[str, int]:
    """The minimum size of each shard file, by name. Does not import torch.

    Raises Damaged if the metadata cannot be read, UserError if it contains a name that may run code.
    """
    path = checkpoint / DCP_METADATA
    sizes: dict[str, int] = {}
    try:
        with path.open("rb") as file:
            metadata = RestrictedUnpickler(file, path, lambda module, name: _Record).load()
        for stored in metadata.state["storage_data"].values():
            name, end = str(stored.state["relative_path"]), int(stored.state["offset"]) + int(stored.state["length"])
            if PurePosixPath(name).name != name:
                raise ValueError("not a file of the folder")
            sizes[name] = max(end, sizes.get(name, 0))
    except FileNotFoundError as error:
        raise Damaged(DCP_METADATA, "is missing") from error
    except OSError as error:
        raise Damaged(DCP_METADATA, f"cannot be read ({error.strerror})") from error
    except (pickle.UnpicklingError, EOFError, AttributeError, KeyError, IndexError, TypeError, ValueError, MemoryError) as error:
        raise Damaged(DCP_METADATA, "is truncated or overwritten") from error
    return sizes


def check_shards(checkpoint: Path) -> None:
    """Raise Damaged if a shard is missing or shorter than in its metadata. For checkpoints without checksums.

    Raises UserError like `shard_sizes`.
    """
    for name, expected in shard_sizes(checkpoint).items():
        if (size := size_of(checkpoint, name)) < expected:
            raise Damaged(name, f"has {size:,} bytes, and {expected:,} were saved")


@contextlib.contextmanager
def convert_read_errors(path: Path) -> Iterator[None]:
    """Convert errors of reading the checkpoint at `path` within the block into a one-line UserError."""
    import torch
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint import CheckpointException

    _restrict_torch()
    try:
        yield
    except CheckpointException as error:
        cause = next((failure[0] for failure in error.failures.values()), error)
        if isinstance(cause, MtpctlError):
            raise cause from error
        raise _read_error(path, cause) from error
    except torch.OutOfMemoryError:
        raise
    except (CheckpointingException, OSError, EOFError, pickle.UnpicklingError, RuntimeError, ValueError) as error:
        raise _read_error(path, error) from error


def _read_error(path: Path, cause: BaseException) -> UserError:
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()] or [""]
    return UserError(f"{path} cannot be read ({type(cause).__name__}: {lines[0]}); if it is damaged, name another checkpoint")


def reader_of(path: Path) -> FileSystemReader:
    """torch's reader for a checkpoint, with the restricted unpickler."""
    from torch.distributed.checkpoint import FileSystemReader

    _restrict_torch()
    return FileSystemReader(path)


def tensors_in(path: Path) -> dict[str, ShardedTensor]:
    """The tensors of a checkpoint by name, without their data."""
    from megatron.core import dist_checkpointing

    with convert_read_errors(path):
        tensors: dict[str, ShardedTensor] = dist_checkpointing.load_tensors_metadata(str(path))
    return tensors


def _restrict_torch() -> None:
    """Make torch read checkpoints without running code from them. Idempotent. Raises RuntimeError for another release of torch.

    torch reads `.metadata` with `pickle.load`, and non-tensor objects with `torch.load(weights_only=False)`. Both can run code from the
    file, and a checkpoint may come from an untrusted source. With this patch, objects are read with torch's own allow-list.
    """
    require_release("torch", _TORCH, __name__)
    import torch
    from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
    from torch.distributed.checkpoint._traverse import set_element
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    def read_metadata(self: FileSystemReader, *args: object, **kwargs: object) -> Metadata:
        path = Path(self._get_metadata_path(kwargs.get("rank")))  # type: ignore[arg-type]
        with path.open("rb") as file:
            metadata = RestrictedUnpickler(file, path, lambda module, name: getattr(importlib.import_module(module), name)).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(f"{path} has no metadata")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def load_bytes(self: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
        name, loaded = read_item.dest_index.fqn, torch.load(value, weights_only=True)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded

    FileSystemReader.read_metadata = read_metadata  # type: ignore[method-assign]
    DefaultLoadPlanner.load_bytes = load_bytes  # type: ignore[method-assign]
