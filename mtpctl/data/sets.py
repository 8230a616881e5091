"""The problems of a run, generated or read according to the recipe sections `data` and `evaluation`.

`RowReader` converts rows to problems: it selects the prompt and answer columns, and reports missing ones.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import chain, islice
from pathlib import Path

from mtpctl.data.inspection import trains_on_rl_rows
from mtpctl.data.messages import LONE_SURROGATE, image_and_video_types, messages_from_columns, parse_conversation, without_nulls
from mtpctl.data.problems import NO_ANSWER, Problem, text_of
from mtpctl.data.rows import Row, read_dataset_rows, read_file_rows
from mtpctl.data.tasks import generate
from mtpctl.errors import PrerequisiteMissing, UserError
from mtpctl.recipe.data import ColumnsConfig, DataConfig, EvaluationConfig, is_dataset_id
from mtpctl.recipe.rollout import RolloutBase

UNNAMED = ""
"""Name of the held-out set of the section `data`, whose metrics are `eval/…` without a name."""


@dataclass(frozen=True, slots=True)
class RowSource:
    """A file, folder or dataset of problems.

    Attributes:
        key: the recipe key of `path`.
        section: the prefix of the recipe keys `subset` and `split`.
    """

    path: str
    reader: RowReader
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

        Raises the errors of `RowReader.problems`, `read_file_rows` and `read_dataset_rows`; PrerequisiteMissing if the hub does not
        respond.
        """
        if is_dataset_id(self.path):
            rows = read_dataset_rows(self.path, self.subset, self.split, field=self.key, section=self.section, fetch=fetch)
        else:
            rows = read_file_rows(Path(self.path), self.key)
        return self.reader.problems(rows, self.name)

    def read(self) -> list[Problem]:
        """All problems. Raises UserError if there is none, and the errors of `problems`."""
        problems = list(self.problems())
        if not problems:
            raise self.empty_error()
        return problems

    def empty_error(self) -> UserError:
        reader = self.reader
        columns = f"`{reader.columns.prompt}`"
        if reader.require_answers and not reader.supervised and reader.columns.answer is not None:
            columns += f" and `{reader.columns.answer}`"
        return UserError(f"{self.key}: {self.path} has no problem; add lines with {columns}")


def read_problems(
    path: str | Path, field: str = "data.path", *, require_answers: bool = True, columns: ColumnsConfig | None = None
) -> list[Problem]:
    """All problems of a file or folder, in order. See `RowSource.read` for errors.

    field: the recipe key or option of the path. require_answers: if false, a row may lack an answer.
    """
    return RowSource(str(path), RowReader(columns or ColumnsConfig(), require_answers=require_answers), field).read()


@dataclass(frozen=True, slots=True)
class ProblemSets:
    """The problems of RL (`train`) and of the supervised stage, and the held-out problems.

    Attributes:
        evaluation: held-out problems of the section `data`.
        by_set_name: held-out problems of the named sets.
        seen_prompts: `prompt_hash` of the held-out prompts that a stage trains on; None if the training rows are not known.
    """

    train: list[Problem]
    evaluation: list[Problem]
    supervised: list[Problem]
    by_set_name: Mapping[str, list[Problem]] = field(default_factory=dict)
    seen_prompts: frozenset[bytes] | None = frozenset()

    @property
    def held_out(self) -> dict[str, list[Problem]]:
        """All held-out sets with problems, by name; the set of the section `data` is `UNNAMED`."""
        return {name: problems for name, problems in {UNNAMED: self.evaluation, **self.by_set_name}.items() if problems}

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

    If `data` sets neither `path` nor `task`, the problems are those of `rollout`'s verifiers environment. The supervised
    stage trains on the problems of RL, unless `data` names others for it. Held-out problems are removed from those of `sft_task`.

    Raises:
        UserError: if there are no problems, if `data` names both files and a task, and for invalid files or rows.
    """
    sources = row_sources(config, evaluation, stages)
    if config.task is not None:
        if config.path is not None or config.eval_path is not None:
            raise UserError("data.task: problems are generated or read, not both; remove data.task or data.path")
        train, held_out = generate(config.task, seed)
    elif _from_environment(config, rollout):
        train, held_out = _load_environment_problems(config, rollout)
    elif config.path is None:
        raise UserError("data.path: name a file, a folder or a dataset id, or generate problems with data.task")
    else:
        train = sources["train"].read()
        held_out = sources["eval"].read() if "eval" in sources else []
    supervised = train
    if config.sft_task is not None:
        excluded = {problem.prompt for problem in held_out}
        supervised = [problem for problem in generate(config.sft_task, seed, "data.sft_task")[0] if problem.prompt not in excluded]
        if not supervised:
            raise UserError("data.sft_task: all its problems are held out by data.task; raise its train_size or max_digits")
    elif "sft" in sources:
        supervised = sources["sft"].read()
    named = dict(_read_named_sets(sources, evaluation))
    trained = [problems for stage, problems in (("rl", train), ("sft", supervised)) if stage in stages]
    seen_prompts = _find_seen_prompts(chain.from_iterable(trained), [held_out, *named.values()])
    return ProblemSets(train, held_out, supervised, named, seen_prompts)


def _find_seen_prompts(trained: Iterable[Problem], held_out: Sequence[Sequence[Problem]]) -> frozenset[bytes]:
    """The hashes of the held-out prompts that occur in `trained`. Training sets may be large, so other hashes are not kept."""
    held_out_hashes = {problem.prompt_hash for problems in held_out for problem in problems}
    if not held_out_hashes:
        return frozenset()
    return frozenset(prompt_hash for problem in trained if (prompt_hash := problem.prompt_hash) in held_out_hashes)


def first_problems(
    config: DataConfig, seed: int, evaluation: EvaluationConfig, limit: int, rollout: RolloutBase | None = None
) -> dict[str, list[Problem]]:
    """Load the first `limit` training problems, as `train`, and held-out problems, as `eval` and `eval/NAME`, without those of `data.task`.

    Does not contact the hub: a dataset that is not in the cache has no problems here.
    """
    problems = {"train": generate(config.task, seed)[0][:limit]} if config.task is not None else {}
    if _from_environment(config, rollout):
        problems = dict(zip(("train", "eval"), _load_environment_problems(config, rollout, limit), strict=True))
    for role, source in row_sources(config, evaluation, ("rl",)).items():
        if role != "sft":
            try:
                problems[role] = list(islice(source.problems(fetch=False), limit))
            except PrerequisiteMissing:
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
    """Load only the held-out problems. Raises the errors of `load_problem_sets`.

    The training rows of `stages` are read only to compare prompts: if there are none, or a row cannot be read, `seen_prompts` is None.
    """
    sources = row_sources(config, evaluation, stages)
    train: Iterable[Problem] | None = None
    if config.task is not None:
        train, held_out = generate(config.task, seed)
    elif _from_environment(config, rollout):
        train, held_out = _load_environment_problems(config, rollout)
    else:
        held_out = sources["eval"].read() if "eval" in sources else []
        train = sources["train"].problems(fetch=False) if "train" in sources else None
    named = dict(_read_named_sets(sources, evaluation))
    if train is None:
        return ProblemSets([], held_out, [], named, None)
    # Problems of `sft_task` are not compared: held-out ones are excluded.
    trained = train if trains_on_rl_rows(stages, has_sft_rows=config.sft_task is not None or "sft" in sources) else ()
    if "sft" in stages and "sft" in sources:
        trained = chain(trained, sources["sft"].problems(fetch=False))
    try:
        seen_prompts: frozenset[bytes] | None = _find_seen_prompts(trained, [held_out, *named.values()])
    except (UserError, PrerequisiteMissing):
        seen_prompts = None
    return ProblemSets([], held_out, [], named, seen_prompts)


def _from_environment(config: DataConfig, rollout: RolloutBase | None) -> bool:
    """Whether the problems of the section `data` are tasks of the environment."""
    return config.path is None and config.task is None and rollout is not None and rollout.verifiers is not None


def _load_environment_problems(
    config: DataConfig, rollout: RolloutBase | None, limit: int | None = None
) -> tuple[list[Problem], list[Problem]]:
    from mtpctl.data.taskset import load_environment_problems

    assert rollout is not None, "the recipe names the environment"
    return load_environment_problems(rollout, config.taskset, limit)


def row_sources(config: DataConfig, evaluation: EvaluationConfig | None, stages: Sequence[str]) -> dict[str, RowSource]:
    """The files and datasets that a run with these stages reads: `train`, `eval`, `sft`, and `eval/NAME` for named sets.

    Errors about columns name the key of the set itself, even if the set uses `data.columns`, because that may be correct for other sets.
    """
    columns, sources = config.columns, {}
    if config.path is not None:
        # RL and the stage `draft` need prompts. A whole conversation is not one, so only runs without these stages accept conversations.
        reader = RowReader(columns, supervised=not {"rl", "draft"} & {*stages})
        sources["train"] = RowSource(config.path, reader, "data.path", config.subset, config.split)
    if config.eval_path is not None:
        sources["eval"] = RowSource(config.eval_path, RowReader(columns), "data.eval_path")
    if config.sft_path is not None:
        reader = RowReader(config.sft_columns or columns, "data.sft_columns", supervised=True)
        sources["sft"] = RowSource(config.sft_path, reader, "data.sft_path", config.sft_subset, config.sft_split, "data.sft_")
    for name, evaluation_set in (evaluation.sets if evaluation else {}).items():
        assert evaluation_set.path is not None, "the recipe's checks reject a set without a path"
        key = f"evaluation.sets.{name}"
        reader = RowReader(evaluation_set.columns or columns, f"{key}.columns")
        sources[f"eval/{name}"] = RowSource(
            evaluation_set.path, reader, f"{key}.path", evaluation_set.subset, evaluation_set.split, f"{key}."
        )
    return sources


def _read_named_sets(sources: Mapping[str, RowSource], evaluation: EvaluationConfig | None) -> Iterator[tuple[str, list[Problem]]]:
    for name, evaluation_set in (evaluation.sets if evaluation else {}).items():
        problems = sources[f"eval/{name}"].read()
        yield name, problems if evaluation_set.limit is None else _at_even_intervals(problems, evaluation_set.limit)


def _at_even_intervals(problems: Sequence[Problem], limit: int) -> list[Problem]:
    count = len(problems)
    return [problems[i * count // limit] for i in range(limit)] if limit < count else list(problems)


CONVERSATIONS = ("messages", "conversations")
"""Conversation columns that the supervised stage uses if the prompt column is missing, in order of preference."""

_USUAL_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "prompt": ("question", "problem", "messages", "conversations", "instruction", "query", "input", "text"),
    "answer": ("gold", "reward_model.ground_truth", "ground_truth", "final_answer", "expected_answer", "label", "target", "output"),
}
"""Usual names of the columns in public datasets, most common first."""
_MISSING = object()


@dataclass(frozen=True, slots=True)
class RowReader:
    """Converts rows to problems.

    Attributes:
        field: the recipe key of `columns`.
        require_answers: if false, a row may lack an answer.
        supervised: a row may be a whole conversation, or have a solution instead of an answer.
    """

    columns: ColumnsConfig
    field: str = "data.columns"
    require_answers: bool = True
    supervised: bool = False

    def problems(self, rows: Iterable[Row], source: str) -> Iterator[Problem]:
        """The problem of each row. `source` names the rows in errors.

        Raises UserError for columns that the first row lacks, and for missing, empty or invalid values in later rows.
        """
        reader = None
        for row in rows:
            if reader is None:
                reader = self._adapt_to(row)
                reader._check_columns(row, source)
            yield reader._parse_row(row)

    def _adapt_to(self, first_row: Row) -> RowReader:
        """The reader for rows like `first_row`.

        In the supervised stage, a column with conversations becomes the prompt if there is no column `prompt`.
        """
        prompt_column = self.columns.prompt
        conversation_column = next((name for name in CONVERSATIONS if first_row.columns.get(name) is not None), None)
        if (
            self.supervised
            and column_value(first_row.columns, prompt_column) is _MISSING
            and conversation_column is not None
            and prompt_column == "prompt"
        ):
            return RowReader(self.columns.model_copy(update={"prompt": conversation_column}), self.field, self.require_answers, True)
        return self

    def _check_columns(self, row: Row, source: str) -> None:
        prompt_column, answer_column = self.columns.prompt, self.columns.answer
        missing = {"prompt": prompt_column} if column_value(row.columns, prompt_column) is _MISSING else {}
        if (
            answer_column is not None
            and self.require_answers
            and not self.supervised
            and column_value(row.columns, answer_column) is _MISSING
        ):
            missing["answer"] = answer_column
        if not missing:
            return
        column_names = _column_names(row.columns)
        closest = {
            role: _closest_column(role, name, column_names, excluded=(prompt_column, answer_column or "")) for role, name in missing.items()
        }
        suggestion = ", ".join(f"{role}: {name or 'NAME'}" for role, name in closest.items())
        role = next(iter(missing))
        missing_names = " and ".join(repr(name) for name in missing.values())
        answer_hint = ", or answer: null if the reward needs none" if "answer" in missing and closest["answer"] is None else ""
        raise UserError(
            f"{self.field}.{role}: {source} has no column {missing_names}; its columns are {', '.join(column_names) or 'none'}: "
            f"set {self.field}: {{{suggestion}}}{answer_hint}"
        )

    def _parse_row(self, row: Row) -> Problem:
        columns, location = self.columns, row.location
        value = messages_from_columns(column_value(row.columns, columns.prompt))
        image_column = next((name for name in ("images", "image") if row.columns.get(name)), None)
        if image_column is not None:
            raise UserError(f"{location}: `{image_column}` contains images, but models are trained only on text; remove the column")
        if part_types := image_and_video_types(value):
            raise UserError(
                f"{location}: `{columns.prompt}` contains images, but models are trained only on text; remove rows whose messages "
                f"contain images (parts of the type {', '.join(part_types)})"
            )
        messages = parse_conversation(value, columns.prompt, location) if isinstance(value, list) else ()
        prompt = text_of(messages) if messages else value
        if not isinstance(prompt, str) or not prompt.strip():
            raise UserError(
                f"{location}: `{columns.prompt}` must be non-blank text, or chat messages, got {_describe(prompt)}; fix or remove the row"
            )
        last_role = messages[-1]["role"] if messages else "user"
        if last_role == "assistant" and not self.supervised:
            raise UserError(
                f"{location}: `{columns.prompt}` ends with an assistant message, but a prompt must end before it; remove that message, "
                "or use the conversations in data.sft_path"
            )
        solution = None if (text := column_value(row.columns, columns.solution)) is _MISSING else text
        if solution is not None and (not isinstance(solution, str) or not solution):
            raise UserError(f"{location}: `{columns.solution}` must be non-empty text if it is present; fix or remove it")
        answer_is_optional = not self.require_answers or (self.supervised and (last_role == "assistant" or solution is not None))
        answer = self._parse_answer(row, answer_is_optional)
        for name, text in ((columns.prompt, prompt), (columns.answer, answer), (columns.solution, solution or "")):
            if LONE_SURROGATE.search(text):
                raise UserError(f"{location}: `{name}` contains a lone surrogate, which is not a character; fix or remove the line")
        used_columns = {columns.prompt, columns.answer, columns.solution}
        fields = {name: value for name, value in row.columns.items() if name not in used_columns}
        if fields.get("tools") is not None:
            fields["tools"] = _parse_tools(fields["tools"], location)
        return Problem(row.row_id, prompt, answer, solution, messages, fields)

    def _parse_answer(self, row: Row, is_optional: bool) -> str:
        column = self.columns.answer
        if column is None:
            if self.supervised and not is_optional:
                raise UserError(f"{row.location}: has neither a final assistant turn nor a `{self.columns.solution}` to train on")
            return NO_ANSWER
        answer = column_value(row.columns, column)
        if isinstance(answer, int | float) and not isinstance(answer, bool):
            return _number_text(answer, column, row.location)
        if (answer is None or answer is _MISSING) and is_optional:
            return NO_ANSWER
        if isinstance(answer, list | dict | bool):
            kind = {list: "a list", dict: "an object", bool: "true or false"}[type(answer)]
            raise UserError(
                f"{row.location}: `{column}` must be non-blank text or a number, not {kind}; for your own reward, set "
                f"{self.field}.answer: null and read it from problem.fields"
            )
        if not isinstance(answer, str) or not answer.strip():
            raise UserError(
                f"{row.location}: `{column}` must be non-blank text or a number, got {_describe(answer)}; fix or remove the row, or set "
                f"{self.field}.answer: null if the reward needs none"
            )
        return answer


def _describe(value: object) -> str:
    if value is _MISSING or value is None:
        return "no such column in this row" if value is _MISSING else "null"
    if isinstance(value, str):
        return "empty text" if not value else "only blanks"
    return {dict: "an object", list: "a list", bool: "true or false"}.get(type(value), f"{value!r:.40}")


def column_value(columns: Mapping[str, object], name: str) -> object:
    """The value of a column; a dotted path selects a nested one."""
    if name in columns:
        return columns[name]
    value: object = columns
    for step in name.split("."):
        if not isinstance(value, Mapping) or step not in value:
            return _MISSING
        value = value[step]
    return value


def _parse_tools(value: object, location: str) -> list[object]:
    """The column `tools` without null fields. The list or each tool may be JSON text, as in datasets without a common schema."""
    try:
        tools = json.loads(value) if isinstance(value, str) and value.strip() else value or []
        if isinstance(tools, list):
            tools = [json.loads(tool) if isinstance(tool, str) else tool for tool in tools]
    except (ValueError, RecursionError) as error:
        raise UserError(f"{location}: `tools` is text that is not JSON; write the list of tools") from error
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{location}: `tools` must be a list of objects, as chat templates take them; fix or remove it")
    if LONE_SURROGATE.search(json.dumps(tools, ensure_ascii=False, default=str)):
        raise UserError(f"{location}: `tools` contains a lone surrogate, which is not a character; fix or remove it")
    return [without_nulls(tool) for tool in tools]


def _number_text(answer: int | float, name: str, location: str) -> str:
    """A number as text, in decimal digits. Drops the `.0` of tools that store all numbers as floats."""
    if isinstance(answer, int):
        return str(answer)
    if not math.isfinite(answer):
        raise UserError(f"{location}: `{name}` must be a finite number, got {answer}; fix or remove the line")
    # Adding 0.0 turns -0.0 into 0.0.
    return f"{Decimal(repr(answer + 0.0)):f}".removesuffix(".0")


def _column_names(columns: Mapping[str, object], prefix: str = "") -> list[str]:
    """The names of all columns, nested ones dotted."""
    names = []
    for name, value in columns.items():
        names += _column_names(value, f"{prefix}{name}.") if isinstance(value, Mapping) and value else [f"{prefix}{name}"]
    return names


def _closest_column(role: str, name: str, names: list[str], excluded: tuple[str, ...]) -> str | None:
    """The column with the most similar name, else the first one with a usual name; None if there is neither."""
    unused = [column for column in names if column not in excluded]
    if similar := difflib.get_close_matches(name, unused, n=1, cutoff=0.7):
        return similar[0]
    by_lower_case = {column.lower(): column for column in reversed(unused)}
    return next((by_lower_case[usual_name] for usual_name in _USUAL_COLUMNS[role] if usual_name in by_lower_case), None)
