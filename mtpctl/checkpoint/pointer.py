"""Which checkpoint of a folder is the newest: `latest` holds its name, and moves last. Reads no tensor and needs no torch."""

from __future__ import annotations

import os
from pathlib import Path

_NAME = "latest"


def pointer_of(root: Path) -> Path:
    """The file that names the newest checkpoint under `root`."""
    return root / _NAME


def newest(root: Path) -> Path | None:
    """The checkpoint that `latest` names, or None. Whether it is whole is found when it is loaded."""
    pointer = pointer_of(root)
    return root / pointer.read_text().strip() if pointer.is_file() else None


def point_to(path: Path) -> None:
    """Name `path` the newest of its folder, atomically."""
    pointer = pointer_of(path.parent)
    aside = pointer.with_name(f"{_NAME}.partial")
    aside.write_text(path.name)
    os.replace(aside, pointer)


def flush(path: Path) -> None:
    """Bring a file, or a folder with the renames in it, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
