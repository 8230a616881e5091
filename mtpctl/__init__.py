"""Asynchronous RL post-training for language models that carry multi-token-prediction heads."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mtpctl.api import Run, find_runs, load_recipe, train

__all__ = ["Run", "find_runs", "load_recipe", "train"]


def __getattr__(name: str) -> object:
    # Every process of a run imports this package, and none needs these.
    if name not in __all__:
        raise AttributeError(f"module 'mtpctl' has no attribute {name!r}")
    # By name: what imports `mtpctl` does not depend on what the top of it needs.
    return getattr(import_module("mtpctl.api"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
