"""One look at the config for a whole export (Megatron-Bridge 0.6.2).

For each q, k and v that it takes apart, Megatron-Bridge makes a copy of the whole transformer config that could be sent to other
pipeline stages, which takes longer than taking them apart. The config does not change meanwhile, so the copy is kept.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import Any

PINNED = "0.6.2"
_MAPPING = "megatron.bridge.models.conversion.param_mapping"
_NAME = "remove_non_pickleables"


def install() -> None:
    """Keep the copies. May be called again. Raises RuntimeError for another release, to be looked at first."""
    if (found := version("megatron-bridge")) != PINNED:
        raise RuntimeError(f"{__name__} was written for megatron-bridge {PINNED}, found {found}: check whether it is still needed")
    mapping: Any = importlib.import_module(_MAPPING)
    upstream = getattr(mapping, _NAME)
    if getattr(upstream, "keeps", False):
        return
    kept: dict[tuple[int, int], tuple[Any, Any]] = {}

    def keeping(config: Any, max_depth: int = 3, current_depth: int = 0) -> Any:
        place = (id(config), max_depth)
        # The original is kept too: its number cannot become another object's.
        if place not in kept or kept[place][0] is not config:
            kept[place] = (config, upstream(config, max_depth, current_depth))
        return kept[place][1]

    keeping.keeps = True  # type: ignore[attr-defined]
    setattr(mapping, _NAME, keeping)
