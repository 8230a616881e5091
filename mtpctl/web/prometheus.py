"""Formats metrics in Prometheus' text format, version 0.0.4."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

MEDIA_TYPE = "text/plain; version=0.0.4"


@dataclass(frozen=True, slots=True)
class Series:
    """One value of a metric. `name` has no prefix."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


def text_of(prefix: str, series: Iterable[Series]) -> str:
    """Format metrics as text. `prefix` is prepended to every name; names must be unique."""
    lines: list[str] = []
    for each in series:
        labels = ",".join(f'{label}="{_escaped(value, quotes=True)}"' for label, value in each.labels.items())
        name = prefix + each.name
        lines += [f"# HELP {name} {_escaped(each.help)}", f"# TYPE {name} {each.kind}"]
        lines.append(f"{name}{f'{{{labels}}}' if labels else ''} {_number(each.value)}")
    return "\n".join(lines) + "\n"


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text


def _number(value: float) -> str:
    if math.isfinite(value):
        return str(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
