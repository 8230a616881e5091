"""Inspect a recipe's data before a run: read as much of each set as a few seconds in total allow."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mtpctl.errors import PrerequisiteMissing
from mtpctl.recipe.data import DataConfig, EvaluationConfig

if TYPE_CHECKING:
    from mtpctl.data.problems import Problem

TIME_LIMIT = 3.0
"""Time limit for reading all sets, in seconds."""


@dataclass(frozen=True, slots=True)
class SetReport:
    """The result of reading one set.

    Attributes:
        role: `train`, `eval`, `sft`, or `eval/NAME` for a named set.
        name: the file, folder or dataset, for messages.
        rows: number of rows read.
        is_complete: whether all rows were read.
        unread_reason: why no row was read; empty otherwise.
        prompt_hashes: to compare the rows of several sets.
    """

    role: str
    name: str
    rows: int
    is_complete: bool
    unread_reason: str = ""
    prompt_hashes: tuple[bytes, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        if self.unread_reason:
            return f"{self.role}: {self.unread_reason}"
        return f"{self.role}: {self.name}, {self.rows:,} rows" + ("" if self.is_complete else " read, not all")


def inspect_sets(data: DataConfig, evaluation: EvaluationConfig, stages: Sequence[str], *, seconds: float = TIME_LIMIT) -> list[SetReport]:
    """Read each file and dataset of the recipe from its beginning, for an equal share of the remaining `seconds`. The hub is not contacted.

    Raises the UserError that a run would raise for these rows, and one for a set without rows.
    """
    if not (data.path or data.eval_path or data.sft_path or evaluation.sets):
        return []
    # Imported only if there is something to read: the import makes `recipe validate` a tenth slower.
    from mtpctl.data.sets import row_sources

    rows_by_role = row_sources(data, evaluation, stages)
    reports, end = [], time.monotonic() + seconds
    for remaining_sets, (role, rows) in zip(range(len(rows_by_role), 0, -1), rows_by_role.items(), strict=True):
        now = time.monotonic()
        try:
            prompt_hashes, is_complete = _hash_prompts(rows.problems(fetch=False), now + max(0.0, end - now) / remaining_sets)
        except PrerequisiteMissing:
            reports.append(SetReport(role, rows.name, 0, False, f"{rows.path} is not in the cache yet; the run downloads it from the hub"))
            continue
        if not prompt_hashes:
            raise rows.empty_error()
        reports.append(SetReport(role, rows.name, len(prompt_hashes), is_complete, prompt_hashes=tuple(prompt_hashes)))
    return reports


def _hash_prompts(problems: Iterator[Problem], deadline: float) -> tuple[list[bytes], bool]:
    """Hashes of the prompts read before the deadline, at least one, and whether these are all."""
    hashes = []
    for problem in problems:
        hashes.append(problem.prompt_hash)
        if time.monotonic() > deadline:
            return hashes, False
    return hashes, True


def trains_on_rl_rows(stages: Sequence[str], *, has_sft_rows: bool) -> bool:
    """Whether a stage trains the trunk on the rows of RL. The supervised stage does unless it has its own."""
    return "rl" in stages or ("sft" in stages and not has_sft_rows)


def leaks_in(reports: Sequence[SetReport], data: DataConfig, stages: Sequence[str]) -> str:
    """A warning if a stage trains on held-out rows, among the rows that were read; empty otherwise."""
    has_sft_rows = data.sft_task is not None or data.sft_path is not None
    roles = {"train"} if trains_on_rl_rows(stages, has_sft_rows=has_sft_rows) else set()
    roles |= {"sft"} if "sft" in stages else set()
    trained_hashes = {prompt_hash for report in reports if report.role in roles for prompt_hash in report.prompt_hashes}
    held_out_hashes = [prompt_hash for report in reports if report.role not in ("train", "sft") for prompt_hash in report.prompt_hashes]
    return leak_warning(sum(prompt_hash in trained_hashes for prompt_hash in held_out_hashes), len(held_out_hashes))


def leak_warning(leaked: int, count: int) -> str:
    """The warning that `leaked` of `count` held-out problems are trained on; empty if none is."""
    if not leaked:
        return ""
    warning = f"{leaked} of {count} held-out problems are trained on too, so their accuracy measures memorization"
    return (
        f"{warning}. The unseen accuracy already excludes them; to correct the accuracy itself, remove them from data.path or data.sft_path"
    )
