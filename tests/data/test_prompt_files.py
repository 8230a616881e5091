"""Prompts without answers, from the same files as problems."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from mtpctl.data import Problem, read_problems
from mtpctl.data.prompt_files import NO_ANSWER, read_prompts
from mtpctl.recipe import UserError

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "name a fish"}, {"prompt": "x", "answer": None}, {"prompt": "2+2=", "answer": 4}]


def test_jsonl_answers_may_be_missing_and_ids_are_those_of_problems(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n")
    answers = [NO_ANSWER if row.get("answer") is None else str(row["answer"]) for row in ROWS]
    wanted = [
        Problem(f"p.jsonl:{i}", str(row["prompt"]), answer) for i, (row, answer) in enumerate(zip(ROWS, answers, strict=True), start=1)
    ]
    assert read_prompts(path, "--prompts") == wanted


def test_a_file_with_every_answer_reads_as_problems_do(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "answer": ["1", "2"]}), path)
    assert read_prompts(path, "--prompts") == read_problems(path)


def test_parquet_without_an_answer_column(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "topic": ["x", "y"]}), path)
    assert read_prompts(path, "--prompts") == [Problem("p.parquet:1", "a", NO_ANSWER), Problem("p.parquet:2", "b", NO_ANSWER)]


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": \n', r"p\.jsonl:2: not JSON"),
        ("p.jsonl", '{"prompt": "a"}\n{"answer": "3"}\n', r"p\.jsonl:2: `prompt` must be text"),
        ("p.jsonl", '{"prompt": "a", "answer": ""}\n', r"p\.jsonl:1: `answer` must be text"),
        ("p.jsonl", "\n", r"--prompts: .*p\.jsonl holds no prompt"),
        ("p.parquet", "not parquet", r"p\.parquet: not a Parquet file"),
        ("p.txt", "hello", r"--prompts: .*p\.txt is neither"),
    ],
)
def test_what_is_wrong_is_told_by_file_and_line(name: str, text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError, match=told):
        read_prompts(path, "--prompts")


def test_a_missing_file_and_a_missing_column(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--prompts: no file"):
        read_prompts(tmp_path / "none.jsonl", "--prompts")
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": ["a"]}), path)
    with pytest.raises(UserError, match=r"no column prompt; the columns are question"):
        read_prompts(path, "--prompts")
