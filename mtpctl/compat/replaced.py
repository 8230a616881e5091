"""A name of an upstream module that stands for something else while a block runs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def replaced(module: str, name: str, value: object, moved: str) -> Iterator[None]:
    """Have `name` in `module` be `value` inside the block. Raises RuntimeError, which says `moved`, where upstream has no such name."""
    names = vars(importlib.import_module(module))
    if name not in names:
        raise RuntimeError(moved)
    found = names[name]
    names[name] = value
    try:
        yield
    finally:
        names[name] = found
