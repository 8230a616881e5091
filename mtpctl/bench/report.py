"""Output of the benchmarks (environment, tables, JSON), and comparison of two results (`mtpctl bench compare`).

A comparison reads two result files. Each number in them is a figure, named by its path. Entries of lists are matched by their keys `name`,
`what`, `seed` …, so their order does not matter. The name of a figure determines whether higher or lower is better; other figures are shown
without a verdict.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from mtpctl.errors import UserError
from mtpctl.telemetry.versions import Versions, collect_versions

Environment = dict[str, str]
"""The hardware under `device`, and versions by package."""


def describe_machine(versions: Versions | None = None) -> Environment:
    """The GPUs (`NVIDIA H200 x 2`) or the number of CPU cores, and the versions of Python and packages.

    versions: the `versions.json` of a run (default: of this process).
    """
    versions = versions or collect_versions()
    machine = versions["machine"]
    gpus = [f"{name} x {machine['cards'].count(name)}" for name in dict.fromkeys(machine["cards"])]
    return {"device": ", ".join(gpus) or f"CPU, {machine['cores']} cores", "python": versions["python"], **versions["packages"]}


def merge_machines(versions: Sequence[Versions | None]) -> Environment:
    """Merge the environments of several runs. If a value differs between runs, all values are listed."""
    environments = [describe_machine(run_versions) for run_versions in versions]
    names = dict.fromkeys(name for environment in environments for name in environment)
    return {name: " / ".join(dict.fromkeys(str(environment.get(name, "none")) for environment in environments)) for name in names}


def format_environment(environment: Mapping[str, object]) -> str:
    return " · ".join([str(environment["device"]), *(f"{name} {value}" for name, value in environment.items() if name != "device")])


def cuda_visible_devices(cards: Sequence[int]) -> str:
    """The value of `CUDA_VISIBLE_DEVICES` for a child process. `cards`: indices of the child's GPUs among the GPUs of this process."""
    own_devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = own_devices.split(",") if own_devices else [str(i) for i in range(max(cards) + 1)]
    return ",".join(names[i] for i in cards)


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def format_spread(values: Sequence[float], format_spec: str) -> str:
    """Format as `median (min–max)`, each with `format_spec`."""
    return f"{statistics.median(values):{format_spec}} ({min(values):{format_spec}}–{max(values):{format_spec}})"


def format_number(value: float | None, format_spec: str) -> str:
    """Format a value; a dash if it was not measured."""
    return "–" if value is None else format(value, format_spec)


def to_json(document: object) -> str:
    """Format as JSON. Infinity and NaN, which JSON does not have, become null."""
    return json.dumps(_replace_non_finite(document), indent=1, allow_nan=False)


def render(document: Mapping[str, object], table: str, *, as_json: bool) -> str:
    """Format as JSON if `as_json`; else environment, timer and table as text."""
    environment = document["environment"]
    assert isinstance(environment, Mapping)
    return to_json(document) if as_json else f"{format_environment(environment)}\nThe timer covers: {document['timer']}.\n\n{table}"


def _replace_non_finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


Direction = Literal["higher", "lower"]
_IDENTITY_KEYS = ("name", "what", "shape", "load", "transport", "batch", "k", "seed")
_LOWER_IS_BETTER = re.compile(
    r"((^|_)(ms|gib|error)|_s|_seconds|seconds|_bytes|_ratio|stall|idle|loss|fall|held_updates)$|^(median|peak|latency)"
)
_HIGHER_IS_BETTER = re.compile(
    r"(tokens_per_\w+|\w+_per_s|tflops|share|acceptance|accept_length|accuracy\w*|late_mean|area|speedup|gain|relative|points)$"
)
_KEYS_WITHOUT_FIGURES = {"environment", "timer", "options", "curves"}
_IGNORED_OPTIONS = {"folder", "transports", "rounds", "repeats", "singles"}
"""Options in which two comparable results may differ."""

_UNITS = {"tokens/s": "tokens_per_s", "ms": "ms", "s": "seconds", "GiB": "gib", "nats": "error"}


@dataclass(frozen=True, slots=True)
class Change:
    """A figure that is in both documents."""

    name: str
    before: float
    after: float
    better: Direction | None

    @property
    def ratio(self) -> float:
        """`after / before`; 1 if both are 0."""
        if self.before == 0:
            return 1.0 if self.after == 0 else float("inf")
        return self.after / self.before

    @property
    def worse_by(self) -> float:
        """Relative deterioration: negative if the figure improved, ±infinite if it was 0 before, 0 if unchanged or without a direction."""
        if self.better is None or self.before == self.after:
            return 0.0
        deterioration = self.after - self.before if self.better == "lower" else self.before - self.after
        return deterioration / abs(self.before) if self.before else math.copysign(math.inf, deterioration)


def read_result(path: Path) -> object:
    """Read a benchmark's JSON. Raises UserError if the file cannot be read or is not JSON."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); name a file that a benchmark wrote with --json") from error


def compare_results(before: object, after: object) -> list[Change]:
    """The figures that both documents have, in the order of the first document. Raises UserError if there are none."""
    first, second = extract_figures(before), extract_figures(after)
    changes = [Change(name, value, second[name], better_direction(name)) for name, value in first.items() if name in second]
    if not changes:
        raise UserError("the two files share no figure; name two results of the same benchmark")
    return changes


def differing_options(before: object, after: object) -> list[str]:
    """The options in both results that differ and make their figures incomparable."""
    first, second = (document.get("options", {}) if isinstance(document, dict) else {} for document in (before, after))
    differing = [name for name in first if name in second and name not in _IGNORED_OPTIONS and first[name] != second[name]]
    return [f"{name}: {first[name]} and {second[name]}" for name in differing]


def extract_figures(document: object, path: str = "") -> dict[str, float]:
    """The numbers in a document by path, such as `results.trained.acceptance`, without settings and keys that identify an entry."""
    result: dict[str, float] = {}
    if isinstance(document, dict):
        for key, value in document.items():
            if not (path == "" and key in _KEYS_WITHOUT_FIGURES) and key not in _IDENTITY_KEYS:
                name = _unit_name(document) if key == "value" else key
                result |= extract_figures(value, f"{path}.{name}".lstrip("."))
    elif isinstance(document, list):
        names = [_entry_name(value, index) for index, value in enumerate(document)]
        for index, (name, value) in enumerate(zip(names, document, strict=True)):
            unique = name if names.count(name) == 1 else f"{name} {index}"
            result |= extract_figures(value, f"{path}.{unique}".lstrip("."))
    elif isinstance(document, int | float) and not isinstance(document, bool):
        result[path] = float(document)
    return result


def better_direction(name: str) -> Direction | None:
    """Whether higher or lower values of a figure are better, according to its name; None if unknown."""
    figure = name.rsplit(".", 1)[-1]
    if _HIGHER_IS_BETTER.search(figure):
        return "higher"
    return "lower" if _LOWER_IS_BETTER.search(figure) else None


def format_changes(changes: list[Change], tolerance: float) -> str:
    rows = []
    for change in changes:
        verdict = "worse" if change.worse_by > tolerance else "better" if change.worse_by < -tolerance else ""
        rows.append((change.name, f"{change.before:.6g}", f"{change.after:.6g}", f"{change.ratio:.3f}", verdict))
    return markdown_table(("figure", "A", "B", "B / A", ""), rows)


def changes_to_json(changes: list[Change]) -> list[dict[str, object]]:
    return [asdict(change) | {"ratio": change.ratio, "worse_by": change.worse_by} for change in changes]


def _unit_name(entry: Mapping[str, object]) -> str:
    """The name of the figure `value` in an entry: that of its unit, else `share` if the entry has a minimum (`at_least`), else `value`."""
    return _UNITS.get(str(entry.get("unit", "")), "share" if entry.get("at_least") else "value")


def _entry_name(value: object, index: int) -> str:
    if isinstance(value, dict):
        parts = [str(value[key]) for key in _IDENTITY_KEYS if key in value]
        if parts:
            return " ".join(parts)
    return str(index)
