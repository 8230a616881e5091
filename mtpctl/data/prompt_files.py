"""Prompts alone from a user's file: the same JSONL or Parquet as for training, where answers may be missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtpctl.data.files import _jsonl_rows, _problem, read_problems
from mtpctl.data.problems import Problem
from mtpctl.recipe import UserError

NO_ANSWER = ""
"""`Problem.answer` of a prompt without one; an answer that is given cannot be empty."""


def read_prompts(path: str | Path, field: str) -> list[Problem]:
    """Every prompt of the file, with its answer where it has one, else `NO_ANSWER`.

    Ids, and what is refused apart from a missing answer, are those of `read_problems`; `field` is what named the file.
    """
    path = Path(path)
    if path.suffix == ".jsonl" and path.is_file():
        rows: Iterator[tuple[int, dict[str, Any]]] = _jsonl_rows(path)
    elif path.suffix == ".parquet" and path.is_file() and (columns := _parquet_columns(path)) and "answer" not in columns:
        rows = _parquet_prompts(path, columns)
    else:
        return read_problems(path, field)
    problems = [_prompt(row, f"{path.name}:{line}", f"{path}:{line}") for line, row in rows]
    if not problems:
        raise UserError(f"{field}: {path} holds no prompt; add lines with `prompt`")
    return problems


def _prompt(row: dict[str, Any], prompt_id: str, where: str) -> Problem:
    if row.get("answer") is not None:
        return _problem(row, prompt_id, where)
    return replace(_problem({**row, "answer": "-"}, prompt_id, where), answer=NO_ANSWER)


def _parquet_columns(path: Path) -> list[str]:
    """Column names, none where the file cannot be read, which `read_problems` then says."""
    import pyarrow
    import pyarrow.parquet

    try:
        return list(pyarrow.parquet.read_schema(path).names)
    except pyarrow.ArrowInvalid:
        return []


def _parquet_prompts(path: Path, columns: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow.parquet

    if "prompt" not in columns:
        raise UserError(f"{path}: no column prompt; the columns are {', '.join(columns)}")
    with pyarrow.parquet.ParquetFile(path) as file:
        rows = (row for batch in file.iter_batches(columns=["prompt"]) for row in batch.to_pylist())
        yield from enumerate(rows, start=1)
