"""Command line of the scripts that generate pages of the docs from tables in the code."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def write_or_check(path: Path, page: Callable[[], str], *, script: str, about: str | None) -> int:
    """Write the page, or with `--check` on the command line only compare it. Returns the exit code: 1 if it is not current."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--check", action="store_true", help="compare only")
    if parser.parse_args().check:
        current = path.exists() and path.read_text(encoding="utf-8") == page()
        print(f"{path}: {'current' if current else f'not current; run scripts/{script}'}")
        return 0 if current else 1
    path.parent.mkdir(exist_ok=True)
    path.write_text(page(), encoding="utf-8")
    return 0
