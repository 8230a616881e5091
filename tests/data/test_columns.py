"""Which column is what: other people's rows are taken, or refused with the setting to write."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from mtpctl.data.columns import Reading
from mtpctl.data.problems import NO_ANSWER, Problem
from mtpctl.data.sets import Rows, read_problems
from mtpctl.errors import UserError
from mtpctl.recipe.data import ColumnsConfig

ASK = {"role": "user", "content": "What is 2+2?"}
SAY = {"role": "assistant", "content": "4"}
GSM8K = {"question": "2+2?", "answer": "2+2=4\n#### 4"}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [ASK],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 0},
}
OPENAI = {"messages": [{"role": "system", "content": "Add."}, ASK, SAY]}


def rows(path: Path, *values: Mapping[str, Any]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def read(path: Path, *, supervised: bool = False, **columns: str | None) -> list[Problem]:
    return Rows(str(path), Reading(ColumnsConfig.model_validate(columns), supervised=supervised)).read()


def test_gsm8k_rows_are_taken_by_their_own_columns(tmp_path: Path) -> None:
    assert read(rows(tmp_path / "r.jsonl", GSM8K), prompt="question") == [Problem("r.jsonl:1", "2+2?", "2+2=4\n#### 4")]


def test_verl_rows_have_messages_and_a_nested_answer_and_the_rest_rides_along(tmp_path: Path) -> None:
    (problem,) = read(rows(tmp_path / "r.jsonl", VERL), answer="reward_model.ground_truth")
    assert (problem.prompt, problem.answer, list(problem.messages)) == ("What is 2+2?", "4", [ASK])
    assert set(problem.fields) == {"data_source", "ability", "reward_model", "extra_info"}
    assert problem.fields["extra_info"] == {"split": "train", "index": 0}


def test_a_conversation_reads_as_text_with_its_roles(tmp_path: Path) -> None:
    (problem,) = read(rows(tmp_path / "r.jsonl", {"prompt": OPENAI["messages"][:2], "answer": "4"}))
    assert problem.prompt == "[system]\nAdd.\n\n[user]\nWhat is 2+2?"


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (GSM8K, "has no column 'prompt'; its columns are question, answer: set data.columns: {prompt: question}"),
        (
            {"question": "a", "gold": "b"},
            "'prompt' and 'answer'; its columns are question, gold: set data.columns: {prompt: question, answer: gold}",
        ),
        ({"promt": "a", "answer": "b"}, "its columns are promt, answer: set data.columns: {prompt: promt}"),
        (VERL, "no column 'answer'; its columns are data_source, prompt, ability, reward_model.style, reward_model.ground_truth, "),
        (VERL, "set data.columns: {answer: reward_model.ground_truth}"),
        ({"messages": [ASK], "label": 4}, "set data.columns: {prompt: messages, answer: label}"),
        ({"prompt": "a", "b": 1}, "set data.columns: {answer: NAME}, or answer: null if the reward needs none"),
    ],
)
def test_missing_column_is_reported_with_existing_ones_and_setting(row: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read(rows(tmp_path / "r.jsonl", row))
    assert str(caught.value).startswith("data.columns.") and told in str(caught.value) and "\n" not in str(caught.value)


def test_suggested_setting_works(tmp_path: Path) -> None:
    assert read(rows(tmp_path / "r.jsonl", VERL), answer="reward_model.ground_truth")[0].answer == "4"
    assert read(rows(tmp_path / "r.jsonl", {"messages": [ASK], "label": 4}), prompt="messages", answer="label")[0].answer == "4"


def test_rows_without_answers_are_allowed_with_null_column(tmp_path: Path) -> None:
    assert read(rows(tmp_path / "r.jsonl", {"prompt": "a", "tests": ["assert f(1)"]}), answer=None) == [
        Problem("r.jsonl:1", "a", NO_ANSWER, fields={"tests": ["assert f(1)"]})
    ]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": [ASK, SAY], "answer": "4"}, "`prompt` ends with an assistant message, but a prompt must end before it"),
        ({"prompt": [], "answer": "4"}, "`prompt` has no messages"),
        ({"prompt": [{"text": "a"}], "answer": "4"}, "must be an object with `role` and `content`; it has text"),
        ({"prompt": ["a"], "answer": "4"}, "must be an object with `role` and `content`; it is 'a'"),
        ({"prompt": [{"role": "user", "content": ""}], "answer": "4"}, "`content` of message 1 of `prompt` must be non-empty text"),
        ({"prompt": [{"role": "user", "content": "\ud800"}], "answer": "4"}, "message 1 of `prompt` contains a lone surrogate"),
        ({"prompt": "a", "answer": ["4"]}, "`answer` must be non-blank text or a number, not a list"),
        ({"prompt": "a", "answer": "4", "tools": "[{"}, "`tools` is text that is not JSON"),
        ({"prompt": "a", "answer": "4", "tools": {"name": "f"}}, "`tools` must be a list of objects"),
    ],
)
def test_invalid_value_is_reported_with_line(row: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read(rows(tmp_path / "r.jsonl", row))
    assert str(caught.value).startswith(f"{tmp_path}/r.jsonl:1: ") and told in str(caught.value)


def test_tools_may_be_written_as_json_text(tmp_path: Path) -> None:
    (problem,) = read(rows(tmp_path / "r.jsonl", {"prompt": [ASK], "answer": "4", "tools": '[{"name": "add"}]'}))
    assert problem.tools == [{"name": "add"}]


def test_supervised_stage_accepts_conversations_and_solutions_without_answer(tmp_path: Path) -> None:
    (whole,) = read(rows(tmp_path / "c.jsonl", OPENAI), supervised=True)
    assert whole.is_conversation and [message["role"] for message in whole.messages] == ["system", "user", "assistant"]
    (solved,) = read(rows(tmp_path / "s.jsonl", {"prompt": "a", "solution": "b"}), supervised=True)
    assert (solved.is_conversation, solved.target) == (False, "b")
    with pytest.raises(UserError, match=r"`answer` must be non-blank text"):
        read(rows(tmp_path / "n.jsonl", {"messages": [ASK]}), supervised=True)


def test_a_folder_is_read_in_the_order_of_names_and_ids_tell_the_file(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".cache").mkdir()
    rows(tmp_path / ".cache" / "z.jsonl", {"prompt": "no", "answer": "no"})
    rows(tmp_path / "b" / "x.jsonl", {"prompt": "2", "answer": "2"})
    (tmp_path / "a.json").write_text(json.dumps([{"prompt": "1", "answer": "1"}]))
    (tmp_path / "README.md").write_text("rows")
    assert [problem.prompt_id for problem in read_problems(tmp_path)] == ["a.json:1", "b/x.jsonl:1"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"data\.path: the folder .*empty has no \.jsonl, \.json or \.parquet file"):
        read_problems(tmp_path / "empty")


def test_json_is_one_list_or_an_object_a_line(tmp_path: Path) -> None:
    lines = rows(tmp_path / "lines.json", {"prompt": "1", "answer": "1"}, {"prompt": "2", "answer": "2"})
    assert [problem.prompt_id for problem in read_problems(lines)] == ["lines.json:1", "lines.json:2"]
    (tmp_path / "list.json").write_text('\n [{"prompt": "1", "answer": "1"}, 3]')
    with pytest.raises(UserError, match=r"list\.json:2: a row must be an object"):
        read_problems(tmp_path / "list.json")
    (tmp_path / "list.json").write_text('[{"prompt": "1",\n]')
    with pytest.raises(UserError, match=r"list\.json: not JSON \(.* at line 2, column 1\)"):
        read_problems(tmp_path / "list.json")


def test_byte_order_mark_is_removed(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "1", "answer": "1"}\n')
    assert read_problems(tmp_path / "r.jsonl")[0].prompt == "1"


def test_parquet_values_that_json_does_not_have_become_text(tmp_path: Path) -> None:
    table = pyarrow.table(
        {
            "prompt": [[ASK | {"name": None}]],
            "answer": [4.0],
            "made": [datetime.datetime(2026, 1, 2, 3, 4)],
            "raw": [b"\x00\xff"],
            "nested": [{"day": datetime.date(2026, 1, 2)}],
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "r.parquet")
    (problem,) = read_problems(tmp_path / "r.parquet")
    assert list(problem.messages) == [ASK] and problem.answer == "4"
    assert problem.fields == {"made": "2026-01-02T03:04:00", "raw": "AP8=", "nested": {"day": "2026-01-02"}}
    assert Problem.from_json(json.loads(json.dumps(problem.to_json()))) == problem
