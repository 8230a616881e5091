"""The jobs that commands run: offline rollout, evaluation, the dry run, manual weight syncs and serving."""

from __future__ import annotations

import sys


def print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
