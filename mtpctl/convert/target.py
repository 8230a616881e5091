"""Where a conversion may write. Imports no torch, so that a command can ask before it loads anything."""

from __future__ import annotations

from pathlib import Path

from mtpctl.errors import UserError


def check_target(source: Path, target: Path, *, force: bool) -> None:
    """Raise UserError for a target that holds the source or lies in it, is a file, or exists without `force`."""
    here, there = source.resolve(), target.resolve()
    if there.is_relative_to(here) or here.is_relative_to(there):
        raise UserError(f"{target}: lies inside {source}, or the other way round; name a DST outside of it")
    if target.exists() and not target.is_dir():
        raise UserError(f"{target}: is a file; name a folder")
    if target.exists() and not force:
        raise UserError(f"{target}: exists; name another DST, or replace it with --force")
