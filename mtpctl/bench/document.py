"""Print the results of a benchmark as JSON, or as text for a terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from mtpctl.bench.machine import told


def text(document: object) -> str:
    """The document as JSON. Infinity and NaN, which JSON does not have, become null."""
    return json.dumps(_finite(document), indent=1, allow_nan=False)


def answer(found: Mapping[str, object], table: str, *, as_json: bool) -> str:
    """The results as JSON, or environment, timer and table as text."""
    environment = found["environment"]
    assert isinstance(environment, Mapping)
    return text(found) if as_json else f"{told(environment)}\nThe timer covers: {found['timer']}.\n\n{table}"


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
