"""The reward function is tried on the first rows before anything starts, and every mistake of it is one line with exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mtpctl.cli.app import app

ROWS = "".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(5))


def check(folder: Path, judge: str, reward: str = "") -> tuple[int, str]:
    """`mtpctl recipe check` on the tiny recipe with this reward function: exit code and output."""
    (folder / "judge.py").write_text(judge)
    (folder / "rows.jsonl").write_text(ROWS)
    (folder / "own.yaml").write_text(f"data: {{task: null, path: rows.jsonl}}\nreward: {{function: judge.py:score{reward}}}\n")
    result = CliRunner().invoke(app, ["recipe", "check", "tiny_mtp", "--overlay", str(folder / "own.yaml")])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return getattr(result.exception, "exit_code", -1), str(result.exception)
    return result.exit_code, result.output


def test_it_gets_three_rows_with_their_own_answers_as_responses(tmp_path: Path) -> None:
    judge = f"""
def score(response, problem, sample):
    assert bytes(sample.response_ids.tolist()).decode() == response == problem.answer
    open({str(tmp_path / "seen")!r}, "a").write(problem.prompt_id + " ")
    return 1.0
"""
    assert check(tmp_path, judge)[0] == 0
    assert sorted((tmp_path / "seen").read_text().split()) == ["rows.jsonl:1", "rows.jsonl:2", "rows.jsonl:3"]


@pytest.mark.parametrize(
    ("judge", "reward", "told"),
    [
        (
            "def score(response, problem, sample): return 1 / 0",
            "",
            "reward.function: judge.py:1: ZeroDivisionError: division by zero, for rows",
        ),
        ("def score(response, problem, sample): return float('nan')", "", "reward.function: judge.py:1: score returned nan, which is not"),
        ("import time\ndef score(*a): time.sleep(9)", ", timeout_s: 0.5", "reward.function: judge.py:2: score took more than 0.5 s"),
        ("def score(response): return 1", "", "reward.function: score(response) cannot be called as score(response, problem, sample)"),
        ("def score(*a): return 1", ", args: {bonus: 2}", "reward.args: score(*a) cannot be called as"),
        ("async def score(response, problem, sample): raise KeyError('x')", "", "reward.function: judge.py:1: KeyError: 'x', for rows"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, judge: str, reward: str, told: str) -> None:
    code, output = check(tmp_path, judge, reward)
    assert code == 2 and output.startswith(f"error: {told}") and "\n" not in output.strip()


def test_a_function_that_rewards_no_row_is_a_caution(tmp_path: Path) -> None:
    code, output = check(tmp_path, "def score(response, problem, sample): return 0.0")
    assert code == 0 and "gives 0 for the own solutions of the first 3 training problems" in output


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        ("{function: 'judge.py:fails'}", "reward.function: judge.py:2: ZeroDivisionError: division by zero, for held.jsonl:1"),
        ("{function: 'judge.py:score', args: {bonsu: 1}}", "reward.args: score(response, problem, sample, bonus=0) cannot be called as"),
        ("{function: math, args: {second: 1}}", "reward.args: score(response, problem, sample, seconds=5.0) cannot be called as"),
        ("{function: length}", "reward.args: length takes one of target and max, in tokens, of at least 1; set {max: 512}, say"),
    ],
)
def test_rewards_of_held_out_sets_are_tried_on_their_own_rows(tmp_path: Path, reward: str, told: str) -> None:
    (tmp_path / "held.jsonl").write_text(ROWS)
    judge = "def score(response, problem, sample, bonus=0): return 1.0\ndef fails(response, problem, sample): return 1 / 0"
    sets = f"}}\nevaluation: {{sets: {{own: {{path: {tmp_path}/held.jsonl, reward: {reward}}}}}"
    code, output = check(tmp_path, judge, sets)
    assert code == 2 and output.removeprefix("error: ").startswith(f"evaluation.sets.own.{told}") and "\n" not in output.strip()
