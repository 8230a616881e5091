"""The problems of a run: generated, or read from the files that the recipe names."""

from __future__ import annotations

from dataclasses import dataclass

from mtpctl.data.files import read_problems
from mtpctl.data.problems import Problem
from mtpctl.data.tasks import generate
from mtpctl.recipe import UserError
from mtpctl.recipe.schema import DataConfig


@dataclass(frozen=True, slots=True)
class ProblemSets:
    """Training problems, and held-out ones (empty where none were named)."""

    train: list[Problem]
    evaluation: list[Problem]


def load_problem_sets(config: DataConfig, seed: int) -> ProblemSets:
    """Read or generate the problems of the recipe's `data` section.

    Raises UserError where the section names neither files nor a task, or both, and whatever reading raises.
    """
    if config.task is not None:
        if config.path is not None or config.eval_path is not None:
            raise UserError("data.task: problems are generated or read, not both; remove data.task or data.path")
        return ProblemSets(*generate(config.task, seed))
    if config.path is None:
        raise UserError("data.path: name a .jsonl or .parquet file, or generate problems with data.task")
    train = read_problems(config.path, "data.path")
    return ProblemSets(train, read_problems(config.eval_path, "data.eval_path") if config.eval_path else [])
