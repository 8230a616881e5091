"""The environment of processes that tests start in other folders."""

from __future__ import annotations

import os
from pathlib import Path

TREE = Path(__file__).parents[1]


def with_tree(**more: str) -> dict[str, str]:
    """This process's environment, in which Python finds this checkout first, then what it finds here."""
    result = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(TREE), *([result] if result else [])]), **more}
