"""Problems from a user's JSONL or Parquet file, with `prompt` and `answer`, and `solution` for the supervised stage."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path

from mtpctl.data.problems import Problem
from mtpctl.errors import UserError

NO_ANSWER = ""
"""`Problem.answer` of a prompt that has no answer. An answer in a file is never empty."""

_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


def read_problems(path: str | Path, field: str = "data.path", *, answers: bool = True) -> list[Problem]:
    """All problems of the file, in its order. Their `prompt_id` is `file:line`, in Parquet with the row, counted from 1, for the line.

    `field` is the recipe key or option that named the file. Without `answers`, a row may lack an answer, which is `NO_ANSWER` then.
    Raises UserError, naming file and line, for a file that is missing, empty or of another kind, a line that is not an object, and a
    prompt or answer that is missing, empty or not text.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{field}: no file {path}; give a .jsonl or .parquet file")
    readers = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise UserError(f"{field}: {path} is neither .jsonl nor .parquet; convert it")
    rows = readers[path.suffix](path, ("prompt", "answer") if answers else ("prompt",))
    problems = [_problem(row, f"{path.name}:{line}", f"{path}:{line}", answers) for line, row in rows]
    if not problems:
        raise UserError(f"{field}: {path} holds no problem; add lines with `prompt`{' and `answer`' if answers else ''}")
    return problems


def _problem(row: dict[str, object], prompt_id: str, where: str, answers: bool) -> Problem:
    prompt = row.get("prompt")
    if _shows_images(prompt) or row.get("images") or row.get("image"):
        raise UserError(f"{where}: image input is not supported: of a multimodal model the language model trains; remove the line")
    if not isinstance(prompt, str) or not prompt:
        raise UserError(f"{where}: `prompt` must be text that is not empty; mend or remove the line")
    answer = row.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = _written(answer, where)
    if answer is None and not answers:
        answer = NO_ANSWER
    elif not isinstance(answer, str) or not answer.strip():
        raise UserError(f"{where}: `answer` must be text that is not blank, or a number; mend or remove the line")
    solution = row.get("solution")
    if solution is not None and (not isinstance(solution, str) or not solution):
        raise UserError(f"{where}: `solution` must be text that is not empty where it is given; mend or remove it")
    for name, text in (("prompt", prompt), ("answer", answer), ("solution", solution or "")):
        if _HALF_CHARACTER.search(text):
            raise UserError(f"{where}: `{name}` holds half of a character (a lone surrogate), which is no text; mend or remove the line")
    return Problem(prompt_id, prompt, answer, solution)


def _written(answer: int | float, where: str) -> str:
    """A number as a response would write it: in decimal digits, without the .0 that tools add whose numbers are all floats."""
    if isinstance(answer, int):
        return str(answer)
    if not math.isfinite(answer):
        raise UserError(f"{where}: `answer` must be a number that is finite, got {answer}; mend or remove the line")
    # Adding 0.0 turns -0.0 into 0.0.
    return f"{Decimal(repr(answer + 0.0)):f}".removesuffix(".0")


def _shows_images(prompt: object) -> bool:
    """Whether a prompt in the form of chat templates, as messages or parts of messages, holds an image or a video."""
    if isinstance(prompt, list):
        return any(_shows_images(part) for part in prompt)
    if not isinstance(prompt, dict):
        return False
    return any(kind in str(prompt.get("type")) for kind in ("image", "video")) or _shows_images(prompt.get("content"))


def _jsonl_rows(path: Path, needed: Sequence[str]) -> Iterator[tuple[int, dict[str, object]]]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    with file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                row = json.loads(raw.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise UserError(f"{path}:{number}: not UTF-8 text; save the file as UTF-8") from error
            except json.JSONDecodeError as error:
                raise UserError(f"{path}:{number}: not JSON ({error.msg} at column {error.colno}); mend or remove the line") from error
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}:{number}: not JSON that can be read ({error}); mend or remove the line") from error
            if not isinstance(row, dict):
                raise UserError(
                    f"{path}:{number}: a line must be an object with {' and '.join(f'`{name}`' for name in needed)}; mend or remove it"
                )
            yield number, row


def _parquet_rows(path: Path, needed: Sequence[str]) -> Iterator[tuple[int, dict[str, object]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            missing = set(needed) - set(file.schema_arrow.names)
            if missing:
                raise UserError(f"{path}: no column {' and '.join(sorted(missing))}; the columns are {', '.join(file.schema_arrow.names)}")
            columns = [name for name in ("prompt", "answer", "solution", "images", "image") if name in file.schema_arrow.names]
            number = 0
            for batch in file.iter_batches(columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: holds text that is not UTF-8 ({error}); write it anew") from error
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: not a Parquet file that can be read ({str(error).splitlines()[0]}); write it anew") from error
