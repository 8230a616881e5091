"""Progress lines of a command."""

from __future__ import annotations

import sys


def print_progress(line: str) -> None:
    """Print a line of progress to stderr."""
    print(line, file=sys.stderr, flush=True)
