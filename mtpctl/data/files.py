"""Problems from a user's file, a folder of files, or a dataset of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mtpctl.data.columns import Reading
from mtpctl.data.problems import Problem
from mtpctl.data.rows import file_rows
from mtpctl.errors import UserError
from mtpctl.recipe.data import ColumnsConfig, is_dataset_id


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
            from mtpctl.data.hub import dataset_rows

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
