"""The problems of a run, generated or from files, as the sections `data` and `evaluation` of the recipe say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from mtpctl.data.columns import Reading
from mtpctl.data.problems import Problem
from mtpctl.data.rows import file_rows
from mtpctl.data.tasks import generate
from mtpctl.errors import EnvironmentMissing, UserError
from mtpctl.recipe.data import ColumnsConfig, DataConfig, is_dataset_id
from mtpctl.recipe.evaluation import EvaluationConfig
from mtpctl.recipe.rollout import RolloutBase

# Problems from a user's file, a folder of files, or a dataset of the Hugging Face hub.


@dataclass(frozen=True, slots=True)
class Rows:
    """A file, folder or dataset of problems: the recipe names it at `key`, and its subset and split at `section` + `subset`, `split`."""

    path: str
    reading: Reading
    key: str = "data.path"
    subset: str | None = None
    split: str = "train"
    section: str = "data."

    @property
    def name(self) -> str:
        """The rows in messages: a file's name, a folder's path, a dataset with its split."""
        if is_dataset_id(self.path):
            return f"{self.path} ({self.split})"
        return Path(self.path).name if Path(self.path).is_file() else self.path

    def problems(self, *, fetch: bool = True) -> Iterator[Problem]:
        """The problems one after another, read as they are asked for. With `fetch=False` a dataset is looked for in the cache alone.

        Raises UserError as `Reading.problems`, `file_rows` and `dataset_rows` do, EnvironmentMissing for a hub that does not answer.
        """
        if is_dataset_id(self.path):
            from mtpctl.data.rows import dataset_rows

            rows = dataset_rows(self.path, self.subset, self.split, field=self.key, section=self.section, fetch=fetch)
        else:
            rows = file_rows(Path(self.path), self.key)
        return self.reading.problems(rows, self.name)

    def read(self) -> list[Problem]:
        """All problems. Raises UserError where there is none, and what `problems` raises."""
        problems = list(self.problems())
        if not problems:
            raise self.empty()
        return problems

    def empty(self) -> UserError:
        """The error for a path that holds no problem."""
        reading = self.reading
        wanted = f"`{reading.columns.prompt}`"
        if reading.answers and not reading.supervised and reading.columns.answer is not None:
            wanted += f" and `{reading.columns.answer}`"
        return UserError(f"{self.key}: {self.path} holds no problem; add lines with {wanted}")


def read_problems(
    path: str | Path, field: str = "data.path", *, answers: bool = True, columns: ColumnsConfig | None = None
) -> list[Problem]:
    """All problems of a file or folder, in order. Their `prompt_id` is `file:line`, counted from 1; in Parquet and JSON lists, `file:row`.

    `field` is the recipe key or option that named the file. Without `answers`, a row may lack an answer, which is `NO_ANSWER` then.
    Raises UserError, naming file and line, for a file that is missing, empty or of another kind, a line that is not an object, and a
    prompt or answer that is missing, empty or not text.
    """
    reading = Reading(columns or ColumnsConfig(), answers=answers)
    return Rows(str(path), reading, field).read()


UNNAMED = ""
"""The name of the held-out set of the section `data`: its metrics are `eval/…` without one."""


@dataclass(frozen=True, slots=True)
class ProblemSets:
    """Problems of RL (`train`), of the supervised stage, and held-out ones: those of the section `data`, and further sets by name."""

    train: list[Problem]
    evaluation: list[Problem]
    supervised: list[Problem]
    named: Mapping[str, list[Problem]] = field(default_factory=dict)

    @property
    def held_out(self) -> dict[str, list[Problem]]:
        """All held-out sets that hold problems, by name; that of the section `data` is `UNNAMED`."""
        return {name: problems for name, problems in {UNNAMED: self.evaluation, **self.named}.items() if problems}

    def seen_in(self, stages: Sequence[str]) -> int:
        """How many held-out problems have a prompt that one of the stages trains on, so that accuracy on them measures memory."""
        trained = {"rl": self.train, "sft": self.supervised}
        prompts = {problem.prompt.strip() for stage in stages for problem in trained[stage]}
        return sum(problem.prompt.strip() in prompts for problems in self.held_out.values() for problem in problems)


def load_problem_sets(
    config: DataConfig,
    seed: int,
    evaluation: EvaluationConfig | None = None,
    *,
    stages: Sequence[str] = ("sft", "rl"),
    rollout: RolloutBase | None = None,
) -> ProblemSets:
    """Read or generate the problems of the recipe's `data` and `evaluation` sections, for a run of these stages.

    The supervised stage trains on the problems of RL unless the section names others. Of problems generated for it those that are held out
    are dropped. Where the section names neither files nor a task, the problems are the tasks of the environment that `rollout` names.
    Raises UserError where there are no problems at all, or the section names both files and a task, and what reading the files raises.
    """
    rows = rows_of(config, evaluation, stages)
    if config.task is not None:
        if config.path is not None or config.eval_path is not None:
            raise UserError("data.task: problems are generated or read, not both; remove data.task or data.path")
        train, held_out = generate(config.task, seed)
    elif _from_environment(config, rollout):
        train, held_out = _environment_problems(config, rollout)
    elif config.path is None:
        raise UserError("data.path: name a file, a folder or a dataset's id, or generate problems with data.task")
    else:
        train = rows["train"].read()
        held_out = rows["eval"].read() if "eval" in rows else []
    supervised = train
    if config.sft_task is not None:
        unseen = {problem.prompt for problem in held_out}
        supervised = [problem for problem in generate(config.sft_task, seed)[0] if problem.prompt not in unseen]
        if not supervised:
            raise UserError("data.sft_task: all its problems are held out by data.task; raise its train_size or max_digits")
    elif "sft" in rows:
        supervised = rows["sft"].read()
    return ProblemSets(train, held_out, supervised, dict(_named(rows, evaluation)))


def first_problems(
    config: DataConfig, seed: int, evaluation: EvaluationConfig, limit: int, rollout: RolloutBase | None = None
) -> dict[str, list[Problem]]:
    """The first problems to train on, as `train`, and of held-out sets, as `eval` and `eval/NAME`.

    No more rows are read than that, and the hub is not asked: a dataset that is not in the cache has none.
    """
    found = {"train": generate(config.task, seed)[0][:limit]} if config.task is not None else {}
    if _from_environment(config, rollout):
        found = dict(zip(("train", "eval"), _environment_problems(config, rollout, limit), strict=True))
    for role, rows in rows_of(config, evaluation, ("rl",)).items():
        if role != "sft":
            try:
                found[role] = list(islice(rows.problems(fetch=False), limit))
            except EnvironmentMissing:
                found[role] = []
    return found


def load_held_out(config: DataConfig, seed: int, evaluation: EvaluationConfig, rollout: RolloutBase | None = None) -> ProblemSets:
    """The held-out problems alone, of which there may be none. Raises as `load_problem_sets` does."""
    rows = rows_of(config, evaluation, ("rl",))
    held_out = generate(config.task, seed)[1] if config.task is not None else rows["eval"].read() if "eval" in rows else []
    if _from_environment(config, rollout):
        held_out = _environment_problems(config, rollout)[1]
    return ProblemSets([], held_out, [], dict(_named(rows, evaluation)))


def _from_environment(config: DataConfig, rollout: RolloutBase | None) -> bool:
    """Whether the problems are the tasks of the environment."""
    return config.path is None and config.task is None and rollout is not None and rollout.verifiers is not None


def _environment_problems(config: DataConfig, rollout: RolloutBase | None, limit: int | None = None) -> tuple[list[Problem], list[Problem]]:
    from mtpctl.data.taskset import environment_problems

    assert rollout is not None, "it names the environment"
    return environment_problems(rollout, config.taskset, limit)


def rows_of(config: DataConfig, evaluation: EvaluationConfig | None, stages: Sequence[str]) -> dict[str, Rows]:
    """Everything that a run of these stages reads: `train`, `eval`, `sft`, and `eval/NAME` for the sets by name.

    A mistake in columns names the key of the file's own, also where it has the columns of `data.columns`: those may be right for others.
    """
    columns, found = config.columns, {}
    if config.path is not None:
        # A run that does not sample may train on conversations, which are no prompts.
        reading = Reading(columns, supervised="rl" not in stages)
        found["train"] = Rows(config.path, reading, "data.path", config.subset, config.split)
    if config.eval_path is not None:
        found["eval"] = Rows(config.eval_path, Reading(columns), "data.eval_path")
    if config.sft_path is not None:
        reading = Reading(config.sft_columns or columns, "data.sft_columns", supervised=True)
        found["sft"] = Rows(config.sft_path, reading, "data.sft_path", config.sft_subset, config.sft_split, "data.sft_")
    for name, each in (evaluation.sets if evaluation else {}).items():
        assert each.path is not None, "the recipe's checks let no set without a path through"
        key = f"evaluation.sets.{name}"
        reading = Reading(each.columns or columns, f"{key}.columns")
        found[f"eval/{name}"] = Rows(each.path, reading, f"{key}.path", each.subset, each.split, f"{key}.")
    return found


def _named(rows: Mapping[str, Rows], evaluation: EvaluationConfig | None) -> Iterator[tuple[str, list[Problem]]]:
    for name, each in (evaluation.sets if evaluation else {}).items():
        problems = rows[f"eval/{name}"].read()
        yield name, problems if each.limit is None else spread(problems, each.limit)


def spread(problems: Sequence[Problem], limit: int) -> list[Problem]:
    """`limit` of the problems, evenly spaced; all where there are fewer."""
    count = len(problems)
    return [problems[i * count // limit] for i in range(limit)] if limit < count else list(problems)
