"""The asynchronous controller: stages, sample buffer, staleness admission, trainer actors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtpctl.train.launch import run

__all__ = ["run"]


def __getattr__(name: str) -> Any:
    if name == "run":
        from mtpctl.train.launch import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
