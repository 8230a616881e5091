"""The file `latest`, which names the newest checkpoint of a folder for human readers. Resuming does not use it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_NAME = "latest"


def pointer_of(root: Path) -> Path:
    """The file that names the newest checkpoint under `root`."""
    return root / _NAME


def point_to(path: Path) -> None:
    """Atomically write the name of `path` to `latest` in its folder. If that fails, the file keeps its previous contents."""
    pointer = pointer_of(path.parent)
    aside = pointer.with_name(f"{_NAME}.partial")
    with contextlib.suppress(OSError):
        aside.write_text(path.name)
        os.replace(aside, pointer)


def flush(path: Path) -> None:
    """Bring a file, or a folder with the renames in it, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
