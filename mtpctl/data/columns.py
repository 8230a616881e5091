"""Converts rows to problems: selects the prompt and answer columns, and reports missing ones."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal

from mtpctl.data.messages import LONE_SURROGATE, as_messages, conversation, visual_types, without_nulls
from mtpctl.data.problems import NO_ANSWER, Problem, text_of
from mtpctl.data.rows import Row
from mtpctl.errors import UserError
from mtpctl.recipe.data import ColumnsConfig

CONVERSATIONS = ("messages", "conversations")
"""Conversation columns that the supervised stage uses if the prompt column is missing, in order of preference."""

_USUAL: Mapping[str, tuple[str, ...]] = {
    "prompt": ("question", "problem", "messages", "conversations", "instruction", "query", "input", "text"),
    "answer": ("gold", "reward_model.ground_truth", "ground_truth", "final_answer", "expected_answer", "label", "target", "output"),
}
"""Usual names of the columns in public datasets, most common first."""
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Reading:
    """How rows are converted to problems.

    Attributes:
        field: the recipe key of `columns`.
        answers: if false, a row may lack an answer.
        supervised: a row may be a whole conversation, or have a solution instead of an answer.
    """

    columns: ColumnsConfig
    field: str = "data.columns"
    answers: bool = True
    supervised: bool = False

    def problems(self, rows: Iterable[Row], source: str) -> Iterator[Problem]:
        """The problem of each row. `source` names the rows in errors.

        Raises UserError for columns that the first row lacks, and for missing, empty or invalid values in later rows.
        """
        reading = None
        for row in rows:
            if reading is None:
                reading = self._adapted(row)
                reading._check_columns(row, source)
            yield reading._problem(row)

    def _adapted(self, first: Row) -> Reading:
        """The reading for rows like `first`.

        In the supervised stage, a conversation column becomes the prompt if there is no column `prompt`.
        """
        prompt = self.columns.prompt
        column = next((name for name in CONVERSATIONS if first.columns.get(name) is not None), None)
        if self.supervised and column_value(first.columns, prompt) is _ABSENT and column is not None and prompt == "prompt":
            return Reading(self.columns.model_copy(update={"prompt": column}), self.field, self.answers, True)
        return self

    def _check_columns(self, row: Row, source: str) -> None:
        prompt, answer = self.columns.prompt, self.columns.answer
        missing = {"prompt": prompt} if column_value(row.columns, prompt) is _ABSENT else {}
        if answer is not None and self.answers and not self.supervised and column_value(row.columns, answer) is _ABSENT:
            missing["answer"] = answer
        if not missing:
            return
        names = _names(row.columns)
        near = {role: _nearest(role, name, names, taken=(prompt, answer or "")) for role, name in missing.items()}
        setting = ", ".join(f"{role}: {name or 'NAME'}" for role, name in near.items())
        role = next(iter(missing))
        absent = " and ".join(repr(name) for name in missing.values())
        no_answer = ", or answer: null if the reward needs none" if "answer" in missing and near["answer"] is None else ""
        raise UserError(
            f"{self.field}.{role}: {source} has no column {absent}; its columns are {', '.join(names) or 'none'}: "
            f"set {self.field}: {{{setting}}}{no_answer}"
        )

    def _problem(self, row: Row) -> Problem:
        columns, where = self.columns, row.where
        value = as_messages(column_value(row.columns, columns.prompt))
        images, types = next((name for name in ("images", "image") if row.columns.get(name)), None), visual_types(value)
        if images or types:
            such_rows = f"rows whose messages contain images (parts of the type {', '.join(types)})"
            what, column = ("the column", images) if images else (such_rows, columns.prompt)
            raise UserError(f"{where}: `{column}` contains images, but models are trained only on text; remove {what}")
        messages = conversation(value, columns.prompt, where) if isinstance(value, list) else ()
        prompt = text_of(messages) if messages else value
        if not isinstance(prompt, str) or not prompt.strip():
            kinds = "non-blank text, or chat messages"
            raise UserError(f"{where}: `{columns.prompt}` must be {kinds}, got {_kind(prompt)}; fix or remove the row")
        ends = messages[-1]["role"] if messages else "user"
        if ends == "assistant" and not self.supervised:
            raise UserError(
                f"{where}: `{columns.prompt}` ends with an assistant message, but a prompt must end before it; remove that message, or use "
                "the conversations in data.sft_path"
            )
        solution = None if (text := column_value(row.columns, columns.solution)) is _ABSENT else text
        if solution is not None and (not isinstance(solution, str) or not solution):
            raise UserError(f"{where}: `{columns.solution}` must be non-empty text if it is present; fix or remove it")
        optional = not self.answers or (self.supervised and (ends == "assistant" or solution is not None))
        answer = self._answer(row, optional)
        for name, text in ((columns.prompt, prompt), (columns.answer, answer), (columns.solution, solution or "")):
            if LONE_SURROGATE.search(text):
                raise UserError(f"{where}: `{name}` contains a lone surrogate, which is not a character; fix or remove the line")
        used = {columns.prompt, columns.answer, columns.solution}
        fields = {name: value for name, value in row.columns.items() if name not in used}
        if fields.get("tools") is not None:
            fields["tools"] = _tools(fields["tools"], where)
        return Problem(row.row_id, prompt, answer, solution, messages, fields)

    def _answer(self, row: Row, optional: bool) -> str:
        name = self.columns.answer
        if name is None:
            if self.supervised and not optional:
                raise UserError(f"{row.where}: has neither a final assistant turn nor a `{self.columns.solution}` to train on")
            return NO_ANSWER
        answer = column_value(row.columns, name)
        if isinstance(answer, int | float) and not isinstance(answer, bool):
            return _number_text(answer, name, row.where)
        if (answer is None or answer is _ABSENT) and optional:
            return NO_ANSWER
        if isinstance(answer, list | dict | bool):
            kind = {list: "a list", dict: "an object", bool: "true or false"}[type(answer)]
            raise UserError(
                f"{row.where}: `{name}` must be non-blank text or a number, not {kind}; for your own reward, set {self.field}.answer: null "
                "and read it from problem.fields"
            )
        if not isinstance(answer, str) or not answer.strip():
            raise UserError(
                f"{row.where}: `{name}` must be non-blank text or a number, got {_kind(answer)}; fix or remove the row, or set "
                f"{self.field}.answer: null if the reward needs none"
            )
        return answer


def _kind(value: object) -> str:
    """Describes a value that is not valid text."""
    if value is _ABSENT or value is None:
        return "no such column in this row" if value is _ABSENT else "null"
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
            return _ABSENT
        value = value[step]
    return value


def _tools(value: object, where: str) -> list[object]:
    """The column `tools` without null fields. The list or each tool may be JSON text, as in datasets without a common schema."""
    try:
        tools = json.loads(value) if isinstance(value, str) and value.strip() else value or []
        tools = [json.loads(tool) if isinstance(tool, str) else tool for tool in tools] if isinstance(tools, list) else tools
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: `tools` is text that is not JSON; write the list of tools") from error
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{where}: `tools` must be a list of objects, as chat templates take them; fix or remove it")
    if LONE_SURROGATE.search(json.dumps(tools, ensure_ascii=False, default=str)):
        raise UserError(f"{where}: `tools` contains a lone surrogate, which is not a character; fix or remove it")
    return [without_nulls(tool) for tool in tools]


def _number_text(answer: int | float, name: str, where: str) -> str:
    """A number as text, in decimal digits. Drops the `.0` of tools that store all numbers as floats."""
    if isinstance(answer, int):
        return str(answer)
    if not math.isfinite(answer):
        raise UserError(f"{where}: `{name}` must be a finite number, got {answer}; fix or remove the line")
    # Adding 0.0 turns -0.0 into 0.0.
    return f"{Decimal(repr(answer + 0.0)):f}".removesuffix(".0")


def _names(columns: Mapping[str, object], above: str = "") -> list[str]:
    """The names of all columns, nested ones dotted."""
    names = []
    for name, value in columns.items():
        names += _names(value, f"{above}{name}.") if isinstance(value, Mapping) and value else [f"{above}{name}"]
    return names


def _nearest(role: str, name: str, names: list[str], taken: tuple[str, ...]) -> str | None:
    """The most likely column: one with a similar name, else one with a usual name; None if there is neither."""
    free = [each for each in names if each not in taken]
    close = difflib.get_close_matches(name, free, n=1, cutoff=0.7)
    lowered = {each.lower(): each for each in reversed(free)}
    return close[0] if close else next((lowered[usual] for usual in _USUAL[role] if usual in lowered), None)
