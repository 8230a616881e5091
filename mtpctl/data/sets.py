"""The problems of a run, generated or from files, as the `data` section of the recipe says."""

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
    """Problems that RL trains on, held-out ones (which may be none), and those that the supervised stage trains on."""

    train: list[Problem]
    evaluation: list[Problem]
    supervised: list[Problem]

    def seen_in(self, stages: Sequence[str]) -> int:
        """How many held-out problems have a prompt that one of the stages trains on, so that accuracy on them measures memory."""
        trained = {"rl": self.train, "sft": self.supervised}
        prompts = {problem.prompt.strip() for stage in stages for problem in trained[stage]}
        return sum(problem.prompt.strip() in prompts for problem in self.evaluation)


def load_problem_sets(config: DataConfig, seed: int) -> ProblemSets:
    """Read or generate the problems of the recipe's `data` section.

    The supervised stage trains on the problems of RL unless the section names others for it. Problems that are generated for it are left
    out where they are held out, since tasks of the same kind can draw the same problem. Raises UserError where the section names neither
    files nor a task, or both, and what reading the files raises.
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
