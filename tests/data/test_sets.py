"""A user's file: what is read, and the one line that each mistake gets."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from mtpctl.data.problems import NO_ANSWER, Problem
from mtpctl.data.sets import load_held_out, load_problem_sets, read_problems
from mtpctl.errors import UserError
from mtpctl.recipe.data import DataConfig, EvaluationConfig, GeneratedTask

GOOD = '{"prompt": "1+1=", "answer": "2"}\n'


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(GOOD + "\n" + '{"prompt": "2+2=", "answer": 4, "solution": "four: 4", "other": []}\n')
    assert read_problems(path) == [
        Problem("train.jsonl:1", "1+1=", "2"),
        Problem("train.jsonl:3", "2+2=", "4", "four: 4", fields={"other": []}),
    ]


def test_parquet(tmp_path: Path) -> None:
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
    answers = [problem.answer for problem in read_problems(path, "--prompts", answers=False)]
    assert answers == ["2", NO_ANSWER, NO_ANSWER, "4"]
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "topic": ["x", "y"]}), path)
    assert read_problems(path, "--prompts", answers=False) == [
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
        read_problems(path, "--prompts", answers=False)


def test_the_data_section(tmp_path: Path) -> None:
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
