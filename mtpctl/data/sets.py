"""The problems of a run: generated, or read from the files that the recipe names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtpctl.data.files import read_problems
from mtpctl.data.problems import Problem
from mtpctl.data.tasks import generate
from mtpctl.errors import UserError
from mtpctl.recipe.data import DataConfig


@dataclass(frozen=True, slots=True)
class ProblemSets:
    """Problems of RL, held-out ones (empty where none were named), and those of the supervised stage."""

    train: list[Problem]
    evaluation: list[Problem]
    supervised: list[Problem]

    def seen_in(self, stages: Sequence[str]) -> int:
        """Held-out problems whose prompt one of the stages trains on: what they tell of a model is what it remembers."""
        trained = {"rl": self.train, "sft": self.supervised}
        prompts = {problem.prompt.strip() for stage in stages for problem in trained[stage]}
        return sum(problem.prompt.strip() in prompts for problem in self.evaluation)


def load_problem_sets(config: DataConfig, seed: int) -> ProblemSets:
    """Read or generate the problems of the recipe's `data` section.

    The supervised stage imitates RL's problems unless the section names others for it; held-out problems are RL's, and what is
    generated for the supervised stage is left out where it is among them: tasks of one kind draw the same problems again.
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
    supervised = train
    if config.sft_task is not None:
        held_out = {problem.prompt for problem in evaluation}
        supervised = [problem for problem in generate(config.sft_task, seed)[0] if problem.prompt not in held_out]
        if not supervised:
            raise UserError("data.sft_task: all its problems are held out by data.task; raise its train_size or max_digits")
    elif config.sft_path is not None:
        supervised = read_problems(config.sft_path, "data.sft_path")
    return ProblemSets(train, evaluation, supervised)
