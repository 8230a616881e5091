"""Asynchronous RL post-training for language models with multi-token-prediction (MTP) heads."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mtpctl.api import Run, find_runs, load_recipe, train

__all__ = ["Run", "find_runs", "load_recipe", "train"]


def __getattr__(name: str) -> object:
    # Loaded on use: every process of a run imports this package, and none needs these names.
    if name not in __all__:
        raise AttributeError(f"module 'mtpctl' has no attribute {name!r}")
    # With an import statement, import-linter would count the dependencies of `mtpctl.api` for every module that imports `mtpctl`.
    return getattr(import_module("mtpctl.api"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
