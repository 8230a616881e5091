"""Patches of torch, transformers, sympy, Megatron-core and Megatron-Bridge. Each checks the installed release or the names it replaces.

Patches of an inference engine are in that engine's package under `rollout`, those of Ray in `mtpctl.cluster.local`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager


def require_release(package: str, release: str, module: str) -> None:
    """Raise RuntimeError unless this release of the package is installed. `module`: the module with the patches, for the message."""
    installed = importlib.metadata.version(package).partition("+")[0]
    if installed != release:
        raise RuntimeError(
            f"{package} {installed} is installed, and {module} was written for {release}: check whether its patches still apply"
        )


@contextmanager
def replace_temporarily(module: str, name: str, replacement: object, error_message: str) -> Iterator[None]:
    """Replace `name` in an upstream module within the block. Raises RuntimeError with `error_message` if the module lacks the name."""
    names = vars(importlib.import_module(module))
    if name not in names:
        raise RuntimeError(error_message)
    original = names[name]
    names[name] = replacement
    try:
        yield
    finally:
        names[name] = original
