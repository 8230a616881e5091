"""From a row to a problem: which column is the prompt, which the answer, and what is said where one is missing."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal

from mtpctl.data.messages import conversation, in_rows, visual_types, without_nulls
from mtpctl.data.problems import NO_ANSWER, Problem, text_of
from mtpctl.data.rows import Row
from mtpctl.errors import UserError
from mtpctl.recipe.data import ColumnsConfig

CONVERSATIONS = ("messages", "conversations")
"""Columns of conversations, in order of preference, for the supervised stage if the prompt column is missing."""

_USUAL: Mapping[str, tuple[str, ...]] = {
    "prompt": ("question", "problem", "messages", "conversations", "instruction", "query", "input", "text"),
    "answer": ("gold", "reward_model.ground_truth", "ground_truth", "final_answer", "expected_answer", "label", "target", "output"),
}
"""Names that other people's data has for a column, the likeliest first."""
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Reading:
    """How rows become problems.

    The recipe names `columns` at the key `field`. Without `answers` a row may lack an answer. With `supervised` it may be a whole
    conversation, or have a solution in place of an answer.
    """

    columns: ColumnsConfig
    field: str = "data.columns"
    answers: bool = True
    supervised: bool = False

    def problems(self, rows: Iterable[Row], source: str) -> Iterator[Problem]:
        """The problem of each row. `source` names the rows in messages.

        Raises UserError, one line: for columns that the first row does not have, with those that it has; and for a value that is missing,
        empty or of another kind in a later one.
        """
        reading = None
        for row in rows:
            if reading is None:
                reading = self._adapted(row)
                reading._check_columns(row, source)
            yield reading._problem(row)

    def _adapted(self, first: Row) -> Reading:
        """The reading to use: with the column of conversations as the prompt, where the supervised stage finds no other."""
        named = self.columns.prompt
        column = next((name for name in CONVERSATIONS if first.columns.get(name) is not None), None)
        if self.supervised and found(first.columns, named) is _ABSENT and column is not None and named == "prompt":
            return Reading(self.columns.model_copy(update={"prompt": column}), self.field, self.answers, True)
        return self

    def _check_columns(self, row: Row, source: str) -> None:
        prompt, answer = self.columns.prompt, self.columns.answer
        missing = {"prompt": prompt} if found(row.columns, prompt) is _ABSENT else {}
        if answer is not None and self.answers and not self.supervised and found(row.columns, answer) is _ABSENT:
            missing["answer"] = answer
        if not missing:
            return
        names = _names(row.columns)
        near = {role: _nearest(role, name, names, taken=(prompt, answer or "")) for role, name in missing.items()}
        setting = ", ".join(f"{role}: {name or 'NAME'}" for role, name in near.items())
        role = next(iter(missing))
        told = " and ".join(repr(name) for name in missing.values())
        no_answer = ", or answer: null where the reward needs none" if "answer" in missing and near["answer"] is None else ""
        raise UserError(
            f"{self.field}.{role}: {source} has no column {told}; its columns are {', '.join(names) or 'none'}: "
            f"set {self.field}: {{{setting}}}{no_answer}"
        )

    def _problem(self, row: Row) -> Problem:
        columns, where = self.columns, row.where
        asked = in_rows(found(row.columns, columns.prompt))
        shown, types = next((name for name in ("images", "image") if row.columns.get(name)), None), visual_types(asked)
        if shown or types:
            like_this = f"rows whose messages show images, as this one's (parts of the type {', '.join(types)})"
            rows, column = ("the column", shown) if shown else (like_this, columns.prompt)
            raise UserError(f"{where}: `{column}` holds images, and models are trained on text alone; remove {rows}")
        messages = conversation(asked, columns.prompt, where) if isinstance(asked, list) else ()
        prompt = text_of(messages) if messages else asked
        if not isinstance(prompt, str) or not prompt.strip():
            kinds = "text that is not blank, or chat messages"
            raise UserError(f"{where}: `{columns.prompt}` must be {kinds}, got {_kind(prompt)}; fix or remove the row")
        ends = messages[-1]["role"] if messages else "user"
        if ends == "assistant" and not self.supervised:
            raise UserError(
                f"{where}: `{columns.prompt}` ends with a message of the assistant, and a prompt ends before it; cut it, or name "
                "conversations to imitate in data.sft_path"
            )
        solution = None if (value := found(row.columns, columns.solution)) is _ABSENT else value
        if solution is not None and (not isinstance(solution, str) or not solution):
            raise UserError(f"{where}: `{columns.solution}` must be text that is not empty where it is given; fix or remove it")
        optional = not self.answers or (self.supervised and (ends == "assistant" or solution is not None))
        answer = self._answer(row, optional)
        for name, text in ((columns.prompt, prompt), (columns.answer, answer), (columns.solution, solution or "")):
            if _HALF_CHARACTER.search(text):
                half = "a lone surrogate, which is not a character"
                raise UserError(f"{where}: `{name}` holds {half}; fix or remove the line")
        used = {columns.prompt, columns.answer, columns.solution}
        fields = {name: value for name, value in row.columns.items() if name not in used}
        if fields.get("tools") is not None:
            fields["tools"] = _tools(fields["tools"], where)
        return Problem(row.row_id, prompt, answer, solution, messages, fields)

    def _answer(self, row: Row, optional: bool) -> str:
        name = self.columns.answer
        if name is None:
            if self.supervised and not optional:
                raise UserError(f"{row.where}: has neither a turn of the assistant at its end nor a `{self.columns.solution}` to train on")
            return NO_ANSWER
        answer = found(row.columns, name)
        if isinstance(answer, int | float) and not isinstance(answer, bool):
            return _written(answer, name, row.where)
        if (answer is None or answer is _ABSENT) and optional:
            return NO_ANSWER
        if isinstance(answer, list | dict | bool):
            kind = {list: "a list", dict: "an object", bool: "true or false"}[type(answer)]
            raise UserError(
                f"{row.where}: `{name}` must be text that is not blank, or a number, not {kind}; a reward of your own finds it in "
                f"problem.fields where {self.field}.answer is null"
            )
        if not isinstance(answer, str) or not answer.strip():
            raise UserError(
                f"{row.where}: `{name}` must be text that is not blank, or a number, got {_kind(answer)}; fix or remove the row, or set "
                f"{self.field}.answer: null where the reward needs none"
            )
        return answer


def _kind(value: object) -> str:
    """A value that is not the text asked for, in words."""
    if value is _ABSENT or value is None:
        return "no such column in this row" if value is _ABSENT else "null"
    if isinstance(value, str):
        return "an empty text" if not value else "blanks alone"
    return {dict: "an object", list: "a list", bool: "true or false"}.get(type(value), f"{value!r:.40}")


def found(columns: Mapping[str, object], name: str) -> object:
    """The value of a column, of a nested one by its dotted path."""
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
    if _HALF_CHARACTER.search(json.dumps(tools, ensure_ascii=False, default=str)):
        raise UserError(f"{where}: `tools` holds a lone surrogate, which is not a character; fix or remove it")
    return [without_nulls(tool) for tool in tools]


def _written(answer: int | float, name: str, where: str) -> str:
    """A number as a response would write it: in decimal digits, without the .0 that tools add whose numbers are all floats."""
    if isinstance(answer, int):
        return str(answer)
    if not math.isfinite(answer):
        raise UserError(f"{where}: `{name}` must be a number that is finite, got {answer}; fix or remove the line")
    # Adding 0.0 turns -0.0 into 0.0.
    return f"{Decimal(repr(answer + 0.0)):f}".removesuffix(".0")


def _names(columns: Mapping[str, object], above: str = "") -> list[str]:
    """The names of all columns, nested ones dotted."""
    names = []
    for name, value in columns.items():
        names += _names(value, f"{above}{name}.") if isinstance(value, Mapping) and value else [f"{above}{name}"]
    return names


def _nearest(role: str, name: str, names: list[str], taken: tuple[str, ...]) -> str | None:
    """The column that is likeliest meant: one of a like name, else one that such data usually has; None without either."""
    free = [each for each in names if each not in taken]
    close = difflib.get_close_matches(name, free, n=1, cutoff=0.7)
    lowered = {each.lower(): each for each in reversed(free)}
    return close[0] if close else next((lowered[usual] for usual in _USUAL[role] if usual in lowered), None)
