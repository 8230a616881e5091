"""Output of the benchmarks: the environment, tables, and JSON."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence

from mtpctl.telemetry.versions import Versions, collect_versions

Environment = dict[str, str]
"""The hardware under `device`, and versions by package."""


def machine(versions: Versions | None = None) -> Environment:
    """The GPUs (`NVIDIA H200 x 2`) or the number of CPU cores, and the versions of Python and packages.

    versions: the `versions.json` of a run (default: of this process).
    """
    versions = versions or collect_versions()
    host, packages = versions["machine"], versions["packages"]
    cards = host["cards"]
    kinds = [f"{kind} x {cards.count(kind)}" for kind in dict.fromkeys(cards)]
    return {"device": ", ".join(kinds) or f"CPU, {host['cores']} cores", "python": versions["python"], **packages}


def machines(versions: Sequence[Versions | None]) -> Environment:
    """Merge the environments of several runs. If a value differs between runs, all values are listed."""
    environments = [machine(each) for each in versions]
    names = dict.fromkeys(name for each in environments for name in each)
    return {name: " / ".join(dict.fromkeys(str(each.get(name, "none")) for each in environments)) for name in names}


def describe(environment: Mapping[str, object]) -> str:
    """Format the environment in one line."""
    return " · ".join([str(environment["device"]), *(f"{name} {value}" for name, value in environment.items() if name != "device")])


def cuda_visible_devices(cards: Sequence[int]) -> str:
    """`CUDA_VISIBLE_DEVICES` for a child process that uses only these GPUs of this process."""
    mine = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = mine.split(",") if mine else [str(i) for i in range(max(cards) + 1)]
    return ",".join(names[i] for i in cards)


def markdown(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def spread(values: Sequence[float], form: str) -> str:
    """Format as `median (min–max)`, each with `form`."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}–{max(values):{form}})"


def number(value: float | None, form: str) -> str:
    """Format a value; a dash if it was not measured."""
    return "–" if value is None else format(value, form)


def to_json(document: object) -> str:
    """Format as JSON. Infinity and NaN, which JSON does not have, become null."""
    return json.dumps(_finite(document), indent=1, allow_nan=False)


def render(document: Mapping[str, object], table: str, *, as_json: bool) -> str:
    """Format as JSON if `as_json`; else environment, timer and table as text."""
    environment = document["environment"]
    assert isinstance(environment, Mapping)
    return to_json(document) if as_json else f"{describe(environment)}\nThe timer covers: {document['timer']}.\n\n{table}"


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
