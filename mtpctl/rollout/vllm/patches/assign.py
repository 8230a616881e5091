"""Attributes of vLLM's classes and modules, set at run time."""

from __future__ import annotations

from types import ModuleType


def assign(owner: type | ModuleType, **members: object) -> None:
    """Set `members` on `owner`, in place of what it has by these names or beside it, for as long as the process lives."""
    for name, member in members.items():
        setattr(owner, name, member)
