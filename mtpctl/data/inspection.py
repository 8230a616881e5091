"""Inspect a recipe's data before a run: read each of its sets for a few seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mtpctl.errors import EnvironmentMissing
from mtpctl.recipe.data import DataConfig, EvaluationConfig

if TYPE_CHECKING:
    from mtpctl.data.problems import Problem

SECONDS = 3.0
"""Time limit for reading all sets, in seconds."""


@dataclass(frozen=True, slots=True)
class SetReport:
    """The result of reading one set.

    Attributes:
        role: as in `rows_of`.
        rows: number of rows read.
        whole: whether all rows were read.
        unread: why no row was read; empty otherwise.
        prompts: hashes of the prompts, to compare the rows of several sets.
    """

    role: str
    name: str
    rows: int
    whole: bool
    unread: str = ""
    prompts: tuple[bytes, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        if self.unread:
            return f"{self.role}: {self.unread}"
        return f"{self.role}: {self.name}, {self.rows:,} rows" + ("" if self.whole else " read, not all")


def inspect_sets(data: DataConfig, evaluation: EvaluationConfig, stages: Sequence[str], *, seconds: float = SECONDS) -> list[SetReport]:
    """Read each file and dataset of the recipe from its beginning, for an equal share of `seconds`. The hub is not contacted.

    Raises the UserError that a run would raise for these rows, and one for a set without rows.
    """
    if not (data.path or data.eval_path or data.sft_path or evaluation.sets):
        return []
    # Imported only if there is something to read: it makes `recipe validate` a tenth slower.
    from mtpctl.data.sets import rows_of

    sets = rows_of(data, evaluation, stages)
    reports, end = [], time.monotonic() + seconds
    for remaining_sets, (role, rows) in zip(range(len(sets), 0, -1), sets.items(), strict=True):
        now = time.monotonic()
        try:
            prompts, whole = _read(rows.problems(fetch=False), now + max(0.0, end - now) / remaining_sets)
        except EnvironmentMissing:
            reports.append(SetReport(role, rows.name, 0, False, f"{rows.path} is not in the cache yet; the run downloads it from the hub"))
            continue
        if not prompts:
            raise rows.empty()
        reports.append(SetReport(role, rows.name, len(prompts), whole, prompts=tuple(prompts)))
    return reports


def _read(problems: Iterator[Problem], deadline: float) -> tuple[list[bytes], bool]:
    """Hashes of the prompts read before the deadline, at least one, and whether these are all."""
    prompts = []
    for problem in problems:
        prompts.append(problem.prompt_hash)
        if time.monotonic() > deadline:
            return prompts, False
    return prompts, True


def leaks_in(reports: Sequence[SetReport], stages: Sequence[str]) -> str:
    """A warning if a stage trains on held-out rows, among the rows that were read; empty otherwise."""
    has_sft_rows = "sft" in stages and any(report.role == "sft" for report in reports)
    roles = {"train"} if "rl" in stages or not has_sft_rows else set()
    roles |= {"sft"} if has_sft_rows else set()
    trained = {prompt for report in reports if report.role in roles for prompt in report.prompts}
    held_out = [prompt for report in reports if report.role not in ("train", "sft") for prompt in report.prompts]
    return leak_warning(sum(prompt in trained for prompt in held_out), len(held_out))


def leak_warning(leaked: int, count: int) -> str:
    """The warning that `leaked` of `count` held-out problems are trained on; empty if none is."""
    if not leaked:
        return ""
    warning = f"{leaked} of {count} held-out problems are trained on too, so their accuracy measures memorization"
    return f"{warning}; the unseen accuracy leaves them out; or remove them from data.path or data.sft_path"
