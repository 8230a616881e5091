"""Copy the transformer config once for a whole export (Megatron-Bridge 0.6.2).

For each fused q, k and v that it splits, Megatron-Bridge copies the whole transformer config without what cannot be pickled, which
takes longer than the split. The config does not change during an export, so one copy serves all.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import Protocol

PINNED = "0.6.2"
_MAPPING = "megatron.bridge.models.conversion.param_mapping"
_NAME = "remove_non_pickleables"


class _Copy(Protocol):
    """Megatron-Bridge's function, which makes the copy."""

    def __call__(self, obj: object, max_depth: int = 3, current_depth: int = 0) -> object: ...


class _CachedCopy:
    """The same function, with a cache by object."""

    def __init__(self, upstream: _Copy) -> None:
        self._upstream = upstream
        self._copies: dict[tuple[int, int], tuple[object, object]] = {}

    def __call__(self, obj: object, max_depth: int = 3, current_depth: int = 0) -> object:
        place = (id(obj), max_depth)
        # The original is kept beside its copy: while it lives, no other object has its id.
        if place not in self._copies or self._copies[place][0] is not obj:
            self._copies[place] = (obj, self._upstream(obj, max_depth, current_depth))
        return self._copies[place][1]


def install() -> None:
    """Replace Megatron-Bridge's function by one with a cache. May be called again. Raises RuntimeError for another release."""
    if (found := version("megatron-bridge")) != PINNED:
        raise RuntimeError(f"{__name__} was written for megatron-bridge {PINNED}, found {found}: check whether it is still needed")
    mapping = vars(importlib.import_module(_MAPPING))
    if not isinstance(mapping[_NAME], _CachedCopy):
        mapping[_NAME] = _CachedCopy(mapping[_NAME])
