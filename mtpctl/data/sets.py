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
    """Problems of RL, held-out ones (empty where none were named), and those of the supervised stage."""

    train: list[Problem]
    evaluation: list[Problem]
    supervised: list[Problem]


def load_problem_sets(config: DataConfig, seed: int) -> ProblemSets:
    """Read or generate the problems of the recipe's `data` section.

    The supervised stage imitates RL's problems unless the section names others for it; held-out problems are RL's.
    Raises UserError where the section names neither files nor a task, or both, and whatever reading raises.
    """
    if config.task is not None:
        if config.path is not None or config.eval_path is not None:
            raise UserError("data.task: problems are generated or read, not both; remove data.task or data.path")
        train, evaluation = generate(config.task, seed)
    elif config.path is None:
        raise UserError("data.path: name a .jsonl or .parquet file, or generate problems with data.task")
    else:
        train = read_problems(config.path, "data.path")
        evaluation = read_problems(config.eval_path, "data.eval_path") if config.eval_path else []
    return ProblemSets(train, evaluation, _supervised(config, seed) or train)


def _supervised(config: DataConfig, seed: int) -> list[Problem]:
    if config.sft_task is not None:
        return generate(config.sft_task, seed)[0]
    return read_problems(config.sft_path, "data.sft_path") if config.sft_path else []
