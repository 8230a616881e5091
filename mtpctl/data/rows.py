"""Rows as they lie in files: .jsonl, .json and Parquet, one file or a folder of them. What the columns mean is not looked at here."""

from __future__ import annotations

import base64
import datetime
import decimal
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from mtpctl.errors import UserError
from mtpctl.recipe.data import ROW_FILES

if TYPE_CHECKING:
    import pyarrow


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its columns, `row_id` that names it in every run (`file:line`), and `where` it lies, for messages."""

    row_id: str
    where: str
    columns: dict[str, object]


def file_rows(path: Path, field: str) -> Iterator[Row]:
    """The rows of a file, or of all files below a folder in the order of their names. Lines and rows are counted from 1.

    `field` is the recipe key or option that named the path. Raises UserError for what is missing, of another kind, or cannot be read,
    and for a row that is no object, naming file and line.
    """
    for file, name in files_of(path, field):
        if file.suffix == ".parquet":
            rows = _parquet_rows(file)
        elif file.suffix == ".json" and _is_array(file):
            rows = _array_rows(file)
        else:
            rows = _jsonl_rows(file)
        for number, columns in rows:
            yield Row(f"{name}:{number}", f"{file}:{number}", columns)


def files_of(path: Path, field: str) -> list[tuple[Path, str]]:
    """The files that `path` stands for, each with the name that its rows have. Raises UserError where there is none."""
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix in ROW_FILES and file.is_file() and not _hidden(file, path))
        if not found:
            raise UserError(f"{field}: the folder {path} holds no .jsonl, .json or .parquet file; name another")
        return [(file, str(file.relative_to(path))) for file in found]
    if not path.is_file():
        raise UserError(f"{field}: no file {path}; give a .jsonl, .json or .parquet file, or a folder of them")
    if path.suffix not in ROW_FILES:
        raise UserError(f"{field}: {path} is neither .jsonl, .json nor .parquet; convert it")
    return [(path, path.name)]


def _hidden(file: Path, folder: Path) -> bool:
    """Whether a file or one of its folders is hidden, as what tools leave beside the data."""
    return any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)


def _jsonl_rows(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    with _opened(path) as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            where = f"{path}:{number}"
            # A byte order mark, as Windows writes it at the beginning of a file, is no part of the text.
            yield number, _object(_parsed(raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw, where), where)


def _array_rows(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    with _opened(path) as file:
        value = _parsed(file.read().removeprefix(b"\xef\xbb\xbf"), str(path))
    assert isinstance(value, list), "its first character is ["
    for number, row in enumerate(value, start=1):
        yield number, _object(row, f"{path}:{number}")


def _is_array(path: Path) -> bool:
    """Whether a .json file is one list of rows; otherwise it has an object a line, as many tools write it."""
    with _opened(path) as file:
        return file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def _parsed(raw: bytes, where: str) -> object:
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 text; save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise UserError(f"{where}: not JSON ({error.msg} at {place}); fix or remove the line") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON that can be read ({error}); fix or remove the line") from error


def _object(row: object, where: str) -> dict[str, object]:
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row must be an object with columns, such as `prompt` and `answer`; fix or remove it")
    return row


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            convert = _has_more_than_json(file.schema_arrow)
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, {name: as_json(value) for name, value in row.items()} if convert else row
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: holds text that is not UTF-8 ({error}); write it anew") from error
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: not a Parquet file that can be read ({str(error).splitlines()[0]}); write it anew") from error


def _has_more_than_json(schema: pyarrow.Schema) -> bool:
    """Whether columns hold what JSON has no value for, such as times and bytes."""
    kinds = ("timestamp", "date", "time", "duration", "decimal", "binary", "map")
    return any(kind in str(column.type) for column in schema for kind in kinds)


def as_json(value: object) -> object:
    """The value as JSON has it: times in ISO 8601, durations in seconds, decimals as text, bytes in base64, all others as text."""
    match value:
        case None | str() | bool() | int() | float():
            return value
        case dict():
            return {str(key): as_json(each) for key, each in value.items()}
        case list() | tuple():
            return [as_json(each) for each in value]
        case datetime.datetime() | datetime.date() | datetime.time():
            return value.isoformat()
        case datetime.timedelta():
            return value.total_seconds()
        case decimal.Decimal():
            return str(value)
        case bytes():
            return base64.b64encode(value).decode("ascii")
    return str(value)
