"""The jobs that commands run: first recipes, dry runs, cluster jobs, offline rollout, evaluation, drafters, weight syncs and serving."""

from __future__ import annotations

import sys


def print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
