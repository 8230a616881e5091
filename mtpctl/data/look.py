"""Check a recipe's data before anything starts: read each of its sets for as long as there is time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtpctl.errors import EnvironmentMissing
from mtpctl.recipe.data import DataConfig
from mtpctl.recipe.evaluation import EvaluationConfig

if TYPE_CHECKING:
    from mtpctl.data.problems import Problem

SECONDS = 3.0
"""How long all sets together are read."""


@dataclass(frozen=True, slots=True)
class SetReport:
    """What was read of one set. `role`: as `rows_of` names it; `rows`: how many; `whole`: whether those are all; `unread`: why none."""

    role: str
    name: str
    rows: int
    whole: bool
    unread: str = ""

    def __str__(self) -> str:
        if self.unread:
            return f"{self.role}: {self.unread}"
        return f"{self.role}: {self.name}, {self.rows:,} rows" + ("" if self.whole else " read, not all")


def look(data: DataConfig, evaluation: EvaluationConfig, stages: Sequence[str], *, seconds: float = SECONDS) -> list[SetReport]:
    """Read every file and every dataset of the recipe from its beginning, each for its share of the seconds. The hub is not asked.

    Raises UserError as a run would, for the rows that were read, and for a set without rows.
    """
    if not (data.path or data.eval_path or data.sft_path or evaluation.sets):
        return []
    # Imported only where there is something to read: `recipe validate` takes a tenth longer with it.
    from mtpctl.data.sets import rows_of

    sets = rows_of(data, evaluation, stages)
    found, end = [], time.monotonic() + seconds
    for left, (role, rows) in zip(range(len(sets), 0, -1), sets.items(), strict=True):
        now = time.monotonic()
        try:
            count, whole = _read(rows.problems(fetch=False), now + max(0.0, end - now) / left)
        except EnvironmentMissing:
            found.append(SetReport(role, rows.name, 0, False, f"{rows.path} is not in the cache yet; the run fetches it from the hub"))
            continue
        if not count:
            raise rows.empty()
        found.append(SetReport(role, rows.name, count, whole))
    return found


def _read(problems: Iterator[Problem], until: float) -> tuple[int, bool]:
    """How many problems could be read until then, and whether those were all. At least one is read."""
    count = 0
    for _ in problems:
        count += 1
        if time.monotonic() > until:
            return count, False
    return count, True
