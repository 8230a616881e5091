"""Problem files: accepted formats, and a one-line error for each mistake."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from mtpctl.data.problems import NO_ANSWER, Problem
from mtpctl.data.sets import RowReader, RowSource, load_held_out, load_problem_sets, read_problems
from mtpctl.errors import UserError
from mtpctl.recipe.data import ColumnsConfig, DataConfig, EvaluationConfig, GeneratedTask

GOOD = '{"prompt": "1+1=", "answer": "2"}\n'


def test_jsonl_rows_become_problems_with_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(GOOD + "\n" + '{"prompt": "2+2=", "answer": 4, "solution": "four: 4", "other": []}\n')
    assert read_problems(path) == [
        Problem("train.jsonl:1", "1+1=", "2"),
        Problem("train.jsonl:3", "2+2=", "4", "four: 4", fields={"other": []}),
    ]


def test_parquet_rows_become_problems_with_row_numbers(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "answer": ["1", "2"], "level": [3, 4]}), path)
    assert read_problems(path) == [
        Problem("train.parquet:1", "a", "1", fields={"level": 3}),
        Problem("train.parquet:2", "b", "2", fields={"level": 4}),
    ]


@pytest.mark.parametrize(
    ("number", "answer"),
    [
        ("42", "42"),
        ("42.0", "42"),
        ("-0.5", "-0.5"),
        ("-0.0", "0"),
        ("1e3", "1000"),
        ("1e23", "1" + "0" * 23),
        ("0.00001", "0.00001"),
        ("1" + "0" * 400, "1" + "0" * 400),
    ],
)
def test_a_number_is_written_as_a_response_has_it(tmp_path: Path, number: str, answer: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(f'{{"prompt": "1+1=", "answer": {number}}}\n')
    assert [problem.answer for problem in read_problems(path)] == [answer]


def test_a_surrogate_pair_is_one_character(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(r'{"prompt": "\ud83d\ude00", "answer": "2"}' + "\n")
    assert read_problems(path)[0].prompt == "😀"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{broken", "not JSON"),
        ("[1, 2]", "must be an object"),
        ('{"answer": "2"}', "`prompt`"),
        ('{"prompt": "", "answer": "2"}', "`prompt`"),
        ('{"prompt": "1+1="}', "`answer`"),
        ('{"prompt": "1+1=", "answer": true}', "`answer`"),
        ('{"prompt": "1+1=", "answer": " \\n"}', "`answer` must be non-blank text"),
        ('{"prompt": "1+1=", "answer": NaN}', "`answer` must be a finite number, got nan"),
        ('{"prompt": "1+1=", "answer": 1e999}', "`answer` must be a finite number, got inf"),
        ('{"prompt": "1+1=", "answer": ' + "9" * 5000 + "}", "not JSON that can be read"),
        ("[" * 100_000, "not JSON that can be read"),
        (r'{"prompt": "\ud83d", "answer": "2"}', "`prompt` contains a lone surrogate"),
        (r'{"prompt": "1+1=", "answer": "2", "solution": "\udc00"}', "`solution` contains a lone surrogate"),
        ('{"prompt": "1+1=", "answer": "2", "solution": ""}', "`solution`"),
        (
            '{"prompt": "1+1=", "answer": "2", "images": ["a.png"]}',
            "`images` contains images, but models are trained only on text; remove the column",
        ),
        (
            '{"prompt": [{"role": "user", "content": [{"type": "image_url"}]}], "answer": "2"}',
            "`prompt` contains images, but models are trained only on text; remove rows whose messages",
        ),
        ('{"prompt": "  ", "answer": "2"}', "`prompt` must be non-blank text, or chat messages, got only blanks; fix or remove"),
        ('{"answer": "2"}', "`prompt` must be non-blank text, or chat messages, got no such column in this row"),
        (
            '{"prompt": {"bytes": "", "path": null}, "answer": "2"}',
            "`prompt` must be non-blank text, or chat messages, got an object",
        ),
        (
            '{"prompt": "1+1=", "answer": ""}',
            "got empty text; fix or remove the row, or set data.columns.answer: null if the reward needs none",
        ),
    ],
)
def test_a_broken_line_is_named_by_file_and_number(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(GOOD + line + "\n" + GOOD)
    with pytest.raises(UserError) as caught:
        read_problems(path)
    assert f"{path}:2: " in str(caught.value)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(GOOD.encode() + b'{"prompt": "\xff", "answer": "2"}\n')
    with pytest.raises(UserError, match=r"train\.jsonl:2: not UTF-8"):
        read_problems(path)


def test_files_that_are_missing_empty_or_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.eval_path: no file"):
        read_problems(tmp_path / "none.jsonl", "data.eval_path")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match="has no problem"):
        read_problems(tmp_path / "empty.jsonl")
    (tmp_path / "train.csv").write_text("prompt,answer\n")
    with pytest.raises(UserError, match=r"neither \.jsonl, \.json nor \.parquet"):
        read_problems(tmp_path / "train.csv")
    (tmp_path / "fake.parquet").write_text(GOOD)
    with pytest.raises(UserError, match="not a readable Parquet file"):
        read_problems(tmp_path / "fake.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"], "label": ["1"]}), tmp_path / "columns.parquet")
    message = r"data\.columns\.answer: columns\.parquet has no column 'answer'; its columns are prompt, label: set .*: {answer: label}$"
    with pytest.raises(UserError, match=message):
        read_problems(tmp_path / "columns.parquet")
    offsets, half = pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0"), pyarrow.py_buffer(b"\xff")
    latin = pyarrow.StringArray.from_buffers(1, offsets, half)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": latin, "answer": ["1"]}), tmp_path / "latin.parquet")
    with pytest.raises(UserError, match=r"latin\.parquet: .*not UTF-8"):
        read_problems(tmp_path / "latin.parquet")


def test_answers_are_optional_if_not_required(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "name a fish"}, {"prompt": "x", "answer": None}, {"prompt": "2+2=", "answer": 4}]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    answers = [problem.answer for problem in read_problems(path, "--prompts", require_answers=False)]
    assert answers == ["2", NO_ANSWER, NO_ANSWER, "4"]
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "topic": ["x", "y"]}), path)
    assert read_problems(path, "--prompts", require_answers=False) == [
        Problem("p.parquet:1", "a", NO_ANSWER, fields={"topic": "x"}),
        Problem("p.parquet:2", "b", NO_ANSWER, fields={"topic": "y"}),
    ]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.jsonl", '{"prompt": "a", "answer": ""}\n', r"p\.jsonl:1: `answer` must be non-blank text"),
        ("p.jsonl", "[]\n", r"p\.jsonl:1: a row must be an object with columns"),
        ("p.jsonl", "\n", r"--prompts: .*p\.jsonl has no problem; add lines with `prompt`$"),
        ("p.txt", "hello", r"--prompts: .*p\.txt is neither"),
    ],
)
def test_invalid_prompt_file_is_reported(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_problems(path, "--prompts", require_answers=False)


def test_data_section_selects_training_evaluation_and_supervised_sets(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(GOOD)
    sets = load_problem_sets(DataConfig(path=str(path)), seed=0)
    assert len(sets.train) == 1 and sets.evaluation == []
    sets = load_problem_sets(DataConfig(path=str(path), eval_path=str(path)), seed=0)
    assert sets.evaluation == sets.train
    sets = load_problem_sets(DataConfig(task=GeneratedTask(train_size=5, eval_size=3)), seed=0)
    assert (len(sets.train), len(sets.evaluation)) == (5, 3) and sets.supervised is sets.train
    sets = load_problem_sets(DataConfig(path=str(path), sft_task=GeneratedTask(name="sort", train_size=4, eval_size=1)), seed=0)
    assert [p.prompt_id for p in sets.supervised] == [f"sort/train/{i}" for i in range(4)] and len(sets.train) == 1
    assert load_problem_sets(DataConfig(task=GeneratedTask(), sft_path=str(path)), seed=0).supervised[0].prompt_id == "train.jsonl:1"
    with pytest.raises(UserError, match=r"data\.path: name a"):
        load_problem_sets(DataConfig(), seed=0)
    with pytest.raises(UserError, match=r"data\.task: .* not both"):
        load_problem_sets(DataConfig(path=str(path), task=GeneratedTask()), seed=0)


def test_held_out_problems_that_are_trained_on_are_counted(tmp_path: Path) -> None:
    def file(name: str, *prompts: str) -> str:
        (tmp_path / name).write_text("".join(json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in prompts))
        return str(tmp_path / name)

    train, sft, held_out = file("train.jsonl", "a", "b"), file("sft.jsonl", "c "), file("eval.jsonl", "b", "c", "d", "d")
    data, named = DataConfig(path=train, sft_path=sft, eval_path=held_out), EvaluationConfig.model_validate({"sets": {"a": {"path": sft}}})
    for stages, count in ((["rl"], 1), (["sft"], 1), (["sft", "rl"], 2)):
        assert load_problem_sets(data, seed=0, stages=stages).count_seen() == count
        assert load_held_out(data, 0, EvaluationConfig(), stages=stages).count_seen() == count
        assert load_held_out(data, 0, named, stages=stages).count_seen() == count + ("sft" in stages)
    sets = load_problem_sets(data, seed=0, stages=["rl"])
    assert [sets.is_seen(problem) for problem in sets.evaluation] == [True, False, False, False]
    assert load_problem_sets(DataConfig(path=train), seed=0).count_seen() == 0


def test_evaluation_does_not_require_training_rows(tmp_path: Path) -> None:
    (tmp_path / "eval.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b"\n')
    for train in ("missing.jsonl", "broken.jsonl"):
        data = DataConfig(path=str(tmp_path / train), eval_path=str(tmp_path / "eval.jsonl"))
        sets = load_held_out(data, 0, EvaluationConfig())
        assert len(sets.evaluation) == 1 and sets.seen_prompts is None and sets.count_seen() == 0
    assert load_held_out(DataConfig(eval_path=str(tmp_path / "eval.jsonl")), 0, EvaluationConfig()).seen_prompts is None


def test_generated_held_out_problems_are_unseen_in_an_evaluation_too() -> None:
    task = GeneratedTask(min_digits=1, max_digits=3, train_size=60, eval_size=20)
    assert load_held_out(DataConfig(task=task, sft_task=task), 0, EvaluationConfig()).seen_prompts == frozenset()


@pytest.mark.parametrize("seed", [0, 1])
def test_generated_problems_that_are_held_out_are_in_no_training_set(seed: int) -> None:
    task = GeneratedTask(min_digits=3, max_digits=8, train_size=4000, eval_size=600)
    sft = GeneratedTask(min_digits=1, max_digits=8, train_size=4000, eval_size=1)
    sets = load_problem_sets(DataConfig(task=task, sft_task=sft), seed)
    assert len(sets.evaluation) == 600 and sets.count_seen() == 0
    assert 3400 <= len(sets.supervised) <= 4000
    small = GeneratedTask(min_digits=1, max_digits=1, train_size=50, eval_size=50)
    sets = load_problem_sets(DataConfig(task=small, sft_task=small.model_copy(update={"train_size": 99, "eval_size": 1})), seed)
    assert sets.count_seen() == 0 and 49 <= len(sets.supervised) <= 50


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
    return RowSource(str(path), RowReader(ColumnsConfig.model_validate(columns), supervised=supervised)).read()


def test_gsm8k_rows_are_read_with_prompt_question(tmp_path: Path) -> None:
    assert read(rows(tmp_path / "r.jsonl", GSM8K), prompt="question") == [Problem("r.jsonl:1", "2+2?", "2+2=4\n#### 4")]


def test_verl_rows_have_messages_a_nested_answer_and_additional_fields(tmp_path: Path) -> None:
    (problem,) = read(rows(tmp_path / "r.jsonl", VERL), answer="reward_model.ground_truth")
    assert (problem.prompt, problem.answer, list(problem.messages)) == ("What is 2+2?", "4", [ASK])
    assert set(problem.fields) == {"data_source", "ability", "reward_model", "extra_info"}
    assert problem.fields["extra_info"] == {"split": "train", "index": 0}


def test_a_conversation_reads_as_text_with_its_roles(tmp_path: Path) -> None:
    (problem,) = read(rows(tmp_path / "r.jsonl", {"prompt": OPENAI["messages"][:2], "answer": "4"}))
    assert problem.prompt == "[system]\nAdd.\n\n[user]\nWhat is 2+2?"


@pytest.mark.parametrize(
    ("row", "message"),
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
def test_missing_column_is_reported_with_existing_ones_and_setting(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read(rows(tmp_path / "r.jsonl", row))
    assert str(caught.value).startswith("data.columns.") and message in str(caught.value) and "\n" not in str(caught.value)


def test_columns_suggested_by_the_error_are_accepted(tmp_path: Path) -> None:
    assert read(rows(tmp_path / "r.jsonl", VERL), answer="reward_model.ground_truth")[0].answer == "4"
    assert read(rows(tmp_path / "r.jsonl", {"messages": [ASK], "label": 4}), prompt="messages", answer="label")[0].answer == "4"


def test_rows_without_answers_are_allowed_with_null_column(tmp_path: Path) -> None:
    assert read(rows(tmp_path / "r.jsonl", {"prompt": "a", "tests": ["assert f(1)"]}), answer=None) == [
        Problem("r.jsonl:1", "a", NO_ANSWER, fields={"tests": ["assert f(1)"]})
    ]


@pytest.mark.parametrize(
    ("row", "message"),
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
def test_invalid_value_is_reported_with_line(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read(rows(tmp_path / "r.jsonl", row))
    assert str(caught.value).startswith(f"{tmp_path}/r.jsonl:1: ") and message in str(caught.value)


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
