"""`mtpctl bench compare`: compares two JSON results of one benchmark.

Every number in the documents is a figure, named by its path. Entries of lists are matched by their keys `name`, `what`, `seed` …, so their
order does not matter. The name of a figure determines whether higher or lower is better; other figures are shown without a verdict.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from mtpctl.bench.report import markdown
from mtpctl.errors import UserError

Better = Literal["higher", "lower"]
_IDENTITY = ("name", "what", "shape", "load", "transport", "batch", "k", "seed")
_LOWER = re.compile(r"((^|_)(ms|gib|error)|_s|_seconds|seconds|_bytes|_ratio|stall|idle|loss|fall|held_updates)$|^(median|peak|latency)")
_HIGHER = re.compile(
    r"(tokens_per_\w+|tflops|share|gb_per_s|acceptance|accept_length|accuracy\w*|late_mean|area|speedup|gain|relative|points)$"
)
_TOP = {"environment", "timer", "options", "curves"}
_FREE = {"folder", "transports", "rounds", "repeats", "singles"}
"""Options in which two comparable results may differ."""

_UNITS = {"tokens/s": "tokens_per_s", "ms": "ms", "s": "seconds", "GiB": "gib", "nats": "error"}


@dataclass(frozen=True, slots=True)
class Change:
    """A figure that is in both documents."""

    name: str
    before: float
    after: float
    better: Better | None

    @property
    def ratio(self) -> float:
        """`after / before`; 1 if both are 0."""
        if self.before == 0:
            return 1.0 if self.after == 0 else float("inf")
        return self.after / self.before

    @property
    def worse_by(self) -> float:
        """Relative deterioration: negative if the figure improved, infinite if it was 0 before, 0 if it has no direction."""
        if self.better is None or self.before == self.after:
            return 0.0
        more = self.after - self.before if self.better == "lower" else self.before - self.after
        return more / abs(self.before) if self.before else math.copysign(math.inf, more)


def read(path: Path) -> object:
    """Read a benchmark's JSON. Raises UserError if the file cannot be read or is not JSON."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); name a file that a benchmark wrote with --json") from error


def changes(before: object, after: object) -> list[Change]:
    """The figures that both documents have, in the order of the first document. Raises UserError if there are none."""
    first, second = figures(before), figures(after)
    shared = [Change(name, value, second[name], better(name)) for name, value in first.items() if name in second]
    if not shared:
        raise UserError("the two files share no figure; name two results of the same benchmark")
    return shared


def unlike(before: object, after: object) -> list[str]:
    """The options in which two results differ so that their figures are not comparable."""
    first, second = (each.get("options", {}) if isinstance(each, dict) else {} for each in (before, after))
    shared = [name for name in first if name in second and name not in _FREE and first[name] != second[name]]
    return [f"{name}: {first[name]} and {second[name]}" for name in shared]


def figures(document: object, path: str = "") -> dict[str, float]:
    """The numbers in a document by path, such as `results.trained.acceptance`."""
    result: dict[str, float] = {}
    if isinstance(document, dict):
        for key, value in document.items():
            if not (path == "" and key in _TOP) and key not in _IDENTITY:
                result |= figures(value, f"{path}.{_measure(document) if key == 'value' else key}".lstrip("."))
    elif isinstance(document, list):
        names = [_name(value, index) for index, value in enumerate(document)]
        for index, (name, value) in enumerate(zip(names, document, strict=True)):
            one = name if names.count(name) == 1 else f"{name} {index}"
            result |= figures(value, f"{path}.{one}".lstrip("."))
    elif isinstance(document, int | float) and not isinstance(document, bool):
        result[path] = float(document)
    return result


def better(name: str) -> Better | None:
    """Whether higher or lower values of a figure are better, according to its name; None if unknown."""
    last = name.rsplit(".", 1)[-1]
    if _HIGHER.search(last):
        return "higher"
    return "lower" if _LOWER.search(last) else None


def table(changes: list[Change], tolerance: float) -> str:
    rows = []
    for change in changes:
        verdict = "worse" if change.worse_by > tolerance else "better" if change.worse_by < -tolerance else ""
        rows.append((change.name, f"{change.before:.6g}", f"{change.after:.6g}", f"{change.ratio:.3f}", verdict))
    return markdown(("figure", "A", "B", "B / A", ""), rows)


def as_json(changes: list[Change]) -> list[dict[str, object]]:
    return [asdict(change) | {"ratio": change.ratio, "worse_by": change.worse_by} for change in changes]


def _measure(entry: Mapping[str, object]) -> str:
    """The name of an entry's `value`, from its unit. A value without a unit but with a lower bound is a share."""
    return _UNITS.get(str(entry.get("unit", "")), "share" if entry.get("at_least") else "value")


def _name(value: object, index: int) -> str:
    if isinstance(value, dict):
        parts = [str(value[key]) for key in _IDENTITY if key in value]
        if parts:
            return " ".join(parts)
    return str(index)
