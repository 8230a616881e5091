"""What a bench writes as JSON."""

from __future__ import annotations

import json
import math
from typing import Any


def text(document: Any) -> str:
    """As every reader takes it: JSON has no infinity and no NaN, so that a number that is none becomes null."""
    return json.dumps(_finite(document), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
