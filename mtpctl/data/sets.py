"""The problems of a run, generated or read according to the recipe sections `data` and `evaluation`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

from mtpctl.data.columns import Reading
from mtpctl.data.problems import Problem
from mtpctl.data.rows import dataset_rows, file_rows
from mtpctl.data.tasks import generate
from mtpctl.errors import EnvironmentMissing, UserError
from mtpctl.recipe.data import ColumnsConfig, DataConfig, EvaluationConfig, is_dataset_id
from mtpctl.recipe.rollout import RolloutBase

UNNAMED = ""
"""Name of the held-out set of the section `data`, whose metrics are `eval/…` without a name."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A file, folder or dataset of problems.

    Attributes:
        key: the recipe key of `path`.
        section: the prefix of the recipe keys `subset` and `split`.
    """

    path: str
    reading: Reading
    key: str = "data.path"
    subset: str | None = None
    split: str = "train"
    section: str = "data."

    @property
    def name(self) -> str:
        """The name in messages: the name of a file, the path of a folder, or the id of a dataset with its split."""
        if is_dataset_id(self.path):
            return f"{self.path} ({self.split})"
        return Path(self.path).name if Path(self.path).is_file() else self.path

    def problems(self, *, fetch: bool = True) -> Iterator[Problem]:
        """The problems, read lazily. With `fetch=False`, a dataset is only read from the cache.

        Raises UserError as `Reading.problems`, `file_rows` and `dataset_rows` do; EnvironmentMissing if the hub does not respond.
        """
        if is_dataset_id(self.path):
            rows = dataset_rows(self.path, self.subset, self.split, field=self.key, section=self.section, fetch=fetch)
        else:
            rows = file_rows(Path(self.path), self.key)
        return self.reading.problems(rows, self.name)

    def read(self) -> list[Problem]:
        """All problems. Raises UserError if there is none, and the errors of `problems`."""
        problems = list(self.problems())
        if not problems:
            raise self.empty()
        return problems

    def empty(self) -> UserError:
        """The error for a path without problems."""
        reading = self.reading
        columns = f"`{reading.columns.prompt}`"
        if reading.answers and not reading.supervised and reading.columns.answer is not None:
            columns += f" and `{reading.columns.answer}`"
        return UserError(f"{self.key}: {self.path} has no problem; add lines with {columns}")


def read_problems(
    path: str | Path, field: str = "data.path", *, answers: bool = True, columns: ColumnsConfig | None = None
) -> list[Problem]:
    """All problems of a file or folder, in order. `prompt_id` is `file:line` from 1; `file:row` in Parquet and JSON lists.

    Args:
        field: the recipe key or option of the path.
        answers: if false, a row may lack an answer, which is then `NO_ANSWER`.

    Raises:
        UserError: with file and line, for missing, empty or unsupported files, and for invalid rows.
    """
    return Rows(str(path), Reading(columns or ColumnsConfig(), answers=answers), field).read()


@dataclass(frozen=True, slots=True)
class ProblemSets:
    """Problems of RL (`train`), of the supervised stage, and held-out ones: those of the section `data`, and named sets.

    Attributes:
        seen_prompts: `prompt_hash` of the held-out prompts that a stage trains on; None if the training rows are not known.
    """

    train: list[Problem]
    evaluation: list[Problem]
    supervised: list[Problem]
    named: Mapping[str, list[Problem]] = field(default_factory=dict)
    seen_prompts: frozenset[bytes] | None = frozenset()

    @property
    def held_out(self) -> dict[str, list[Problem]]:
        """All held-out sets with problems, by name; the set of the section `data` is `UNNAMED`."""
        return {name: problems for name, problems in {UNNAMED: self.evaluation, **self.named}.items() if problems}

    def is_seen(self, problem: Problem) -> bool:
        """Whether a stage trains on the prompt of this held-out problem, so that its accuracy may be memorization."""
        return problem.prompt_hash in (self.seen_prompts or ())

    def count_seen(self) -> int:
        """Number of held-out problems whose prompt a stage trains on."""
        return sum(self.is_seen(problem) for problems in self.held_out.values() for problem in problems)


def load_problem_sets(
    config: DataConfig,
    seed: int,
    evaluation: EvaluationConfig | None = None,
    *,
    stages: Sequence[str] = ("sft", "rl"),
    rollout: RolloutBase | None = None,
) -> ProblemSets:
    """Read or generate the problems of a run with these stages.

    The supervised stage trains on RL's problems unless the section names others; held-out problems are removed from its generated ones. If
    the section names neither files nor a task, the problems are the tasks of `rollout`'s environment.

    Raises:
        UserError: if there are no problems, if the section names both files and a task, and for invalid files or rows.
    """
    rows = rows_of(config, evaluation, stages)
    if config.task is not None:
        if config.path is not None or config.eval_path is not None:
            raise UserError("data.task: problems are generated or read, not both; remove data.task or data.path")
        train, held_out = generate(config.task, seed)
    elif _from_environment(config, rollout):
        train, held_out = _environment_problems(config, rollout)
    elif config.path is None:
        raise UserError("data.path: name a file, a folder or a dataset id, or generate problems with data.task")
    else:
        train = rows["train"].read()
        held_out = rows["eval"].read() if "eval" in rows else []
    supervised = train
    if config.sft_task is not None:
        excluded = {problem.prompt for problem in held_out}
        supervised = [problem for problem in generate(config.sft_task, seed)[0] if problem.prompt not in excluded]
        if not supervised:
            raise UserError("data.sft_task: all its problems are held out by data.task; raise its train_size or max_digits")
    elif "sft" in rows:
        supervised = rows["sft"].read()
    named = dict(_named_sets(rows, evaluation))
    trained = [problems for stage, problems in (("rl", train), ("sft", supervised)) if stage in stages]
    shared = _seen(chain.from_iterable(trained), [held_out, *named.values()])
    return ProblemSets(train, held_out, supervised, named, shared)


def _seen(trained: Iterable[Problem], held_out: Sequence[Sequence[Problem]]) -> frozenset[bytes]:
    """The hashes of the held-out prompts that occur in `trained`. Keeps no other hash, because training sets may be large."""
    prompts = {problem.prompt_hash for problems in held_out for problem in problems}
    return frozenset(key for problem in trained if (key := problem.prompt_hash) in prompts) if prompts else frozenset()


def first_problems(
    config: DataConfig, seed: int, evaluation: EvaluationConfig, limit: int, rollout: RolloutBase | None = None
) -> dict[str, list[Problem]]:
    """The first training problems, as `train`, and held-out problems, as `eval` and `eval/NAME`.

    Reads no further rows and does not contact the hub: a dataset that is not in the cache has none.
    """
    problems = {"train": generate(config.task, seed)[0][:limit]} if config.task is not None else {}
    if _from_environment(config, rollout):
        problems = dict(zip(("train", "eval"), _environment_problems(config, rollout, limit), strict=True))
    for role, rows in rows_of(config, evaluation, ("rl",)).items():
        if role != "sft":
            try:
                problems[role] = list(islice(rows.problems(fetch=False), limit))
            except EnvironmentMissing:
                problems[role] = []
    return problems


def load_held_out(
    config: DataConfig,
    seed: int,
    evaluation: EvaluationConfig,
    rollout: RolloutBase | None = None,
    *,
    stages: Sequence[str] = ("sft", "rl"),
) -> ProblemSets:
    """Only the held-out problems, if any. Raises like `load_problem_sets`.

    The training rows of `stages` are read to compare prompts. They are optional here: `seen_prompts` is None if there are none, or if a row
    cannot be read.
    """
    rows = rows_of(config, evaluation, stages)
    train: Iterable[Problem] | None = None
    if config.task is not None:
        train, held_out = generate(config.task, seed)
    elif _from_environment(config, rollout):
        train, held_out = _environment_problems(config, rollout)
    else:
        held_out = rows["eval"].read() if "eval" in rows else []
        train = rows["train"].problems(fetch=False) if "train" in rows else None
    named = dict(_named_sets(rows, evaluation))
    if train is None:
        return ProblemSets([], held_out, [], named, None)
    # The supervised stage trains on RL's rows unless it has others. A separate generated set has no held-out problem.
    separate = config.sft_task is not None or "sft" in rows
    trained = train if "rl" in stages or not separate else ()
    if "sft" in stages and "sft" in rows:
        trained = chain(trained, rows["sft"].problems(fetch=False))
    try:
        shared: frozenset[bytes] | None = _seen(trained, [held_out, *named.values()])
    except (UserError, EnvironmentMissing):
        shared = None
    return ProblemSets([], held_out, [], named, shared)


def _from_environment(config: DataConfig, rollout: RolloutBase | None) -> bool:
    """Whether the problems are tasks of the environment."""
    return config.path is None and config.task is None and rollout is not None and rollout.verifiers is not None


def _environment_problems(config: DataConfig, rollout: RolloutBase | None, limit: int | None = None) -> tuple[list[Problem], list[Problem]]:
    from mtpctl.data.taskset import environment_problems

    assert rollout is not None, "it names the environment"
    return environment_problems(rollout, config.taskset, limit)


def rows_of(config: DataConfig, evaluation: EvaluationConfig | None, stages: Sequence[str]) -> dict[str, Rows]:
    """The files and datasets that a run with these stages reads: `train`, `eval`, `sft`, and `eval/NAME` for named sets.

    Errors about columns name the key of the set itself, even if it uses `data.columns`, which may be correct for other sets.
    """
    columns, rows = config.columns, {}
    if config.path is not None:
        # Only a run without RL may train on conversations, which are not prompts.
        reading = Reading(columns, supervised=not {"rl", "draft"} & {*stages})
        rows["train"] = Rows(config.path, reading, "data.path", config.subset, config.split)
    if config.eval_path is not None:
        rows["eval"] = Rows(config.eval_path, Reading(columns), "data.eval_path")
    if config.sft_path is not None:
        reading = Reading(config.sft_columns or columns, "data.sft_columns", supervised=True)
        rows["sft"] = Rows(config.sft_path, reading, "data.sft_path", config.sft_subset, config.sft_split, "data.sft_")
    for name, each in (evaluation.sets if evaluation else {}).items():
        assert each.path is not None, "the recipe's checks reject a set without a path"
        key = f"evaluation.sets.{name}"
        reading = Reading(each.columns or columns, f"{key}.columns")
        rows[f"eval/{name}"] = Rows(each.path, reading, f"{key}.path", each.subset, each.split, f"{key}.")
    return rows


def _named_sets(rows: Mapping[str, Rows], evaluation: EvaluationConfig | None) -> Iterator[tuple[str, list[Problem]]]:
    for name, each in (evaluation.sets if evaluation else {}).items():
        problems = rows[f"eval/{name}"].read()
        yield name, problems if each.limit is None else evenly_spaced(problems, each.limit)


def evenly_spaced(problems: Sequence[Problem], limit: int) -> list[Problem]:
    count = len(problems)
    return [problems[i * count // limit] for i in range(limit)] if limit < count else list(problems)
