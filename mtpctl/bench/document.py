"""What a bench answers: JSON, or lines for a terminal."""

from __future__ import annotations

import json
import math
from typing import Any

from mtpctl.bench.machine import told


def text(document: Any) -> str:
    """As every reader takes it: JSON has no infinity and no NaN, so that a number that is none becomes null."""
    return json.dumps(_finite(document), indent=1, allow_nan=False)


def answer(found: dict[str, Any], table: str, *, as_json: bool) -> str:
    """All that was found, or what it ran on, what its timer covers, and the table."""
    return text(found) if as_json else f"{told(found['environment'])}\nThe timer covers: {found['timer']}.\n\n{table}"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
