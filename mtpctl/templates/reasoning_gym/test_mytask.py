"""Rewards of mytask. Run `pytest` in this folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from reward import score, shown_steps, stated_answer

from mtpctl.data.problems import Problem
from mtpctl.samples import Sample

ROWS = [json.loads(line) for line in Path(__file__).with_name("held_out.jsonl").read_text().splitlines()]
SAMPLE = Sample("held_out.jsonl:1", "group", [1])


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("4 + 3 is 7. The answer is 7.", "7"),
        ("The final answer to this problem is: **-54**.", "-54"),
        ("The answer is 12 - 5 = 7. Is it?", "7"),
        ("The answer is 3. No, the answer is 4.5.\nBye.", "4.5"),
        ("12 and 1,024", "1,024"),
        ("I do not know", None),
    ],
)
def test_stated_answer_of_a_response(response: str, answer: str | None) -> None:
    assert stated_answer(response, "1") == answer


@pytest.mark.parametrize(
    ("response", "credit"),
    [
        ("84 - 55 = 29, 29 + 10 = 39. The answer is 39.", 1),
        ("84-55=$29. 29+10=39.", 1),
        ("84 - 55 = 29 + 10 = 39", 1),
        ("84 - 55 = 29", 0.5),
        ("84 - 55 = 29, 84 - 55 = 29", 0.5),
        ("29 + 10 = 39, 84 - 55 = 29", 0.5),
        ("84 - 55 = 28, then 28 + 10 = 38", 0.3),
        ("84 - 55 = 28, then 28 + 10 = 39", 0.3),
        ("84 - 55 = -29 and -29 + 10 = -19", (0.1 + 0.3) / 2),
        ("84 - 55 = -29 and -29 + 10 = 19", 0.1),
        ("84 - 55 = **29**, (29) + 10 = **39**", 1),
        ("The answer is 84 - 55 = 29, 29 + 10 = 39.", 1),
        ("84 - 55 = 29. The answer is 39. 29 + 10 = 39", 0.5),
        ("84 - 55 = 29 and 29 + 10 = 38", (1 + 0.3) / 2),
        ("84 - 55 + 10 = 39", 0),
        ("184 - 55 = 29, 1,84 - 55 = 29, 3 + 84 - 55 = 29", 0),
        ("84 - 55 = 29.5", 0),
        ("29 + 10 = 39", 0),
        ("The answer is 39.", 0),
    ],
)
def test_credit_of_the_steps_of_a_sum(response: str, credit: float) -> None:
    assert shown_steps(response, "84 - 55 + 10") == pytest.approx(credit)


@pytest.mark.parametrize(
    ("response", "credit"),
    [
        ("10 - 45 = -35", 1),
        ("10 - 45 = - 35", 1),
        ("10 - 45 = (-35)", 1),
        ("10 - 45 = \u221235", 1),
        ("10 - 45 = -55", 0.3),
        ("10 - 45 = 35", 0.1),
    ],
)
def test_credit_of_a_negative_result(response: str, credit: float) -> None:
    assert shown_steps(response, "10 - 45") == pytest.approx(credit)


def test_negative_result_is_the_next_left_side() -> None:
    assert shown_steps("10 - 45 = (-35), (-35) + 5 = -30", "10 - 45 + 5") == 1


def test_numbers_may_have_thousands_separators() -> None:
    assert shown_steps("950 + 120 = 1,070. 1,070 + 5 = 1,075", "950 + 120 + 5") == 1


def test_single_term_has_no_steps() -> None:
    assert shown_steps("", "84") == 0


def test_answer_of_every_row_counts_as_correct() -> None:
    for row in ROWS:
        problem = Problem("held_out.jsonl:1", row["question"], row["answer"], fields=row)
        assert score(f"The answer is {row['answer']}.", problem, SAMPLE)["correct"] == 1, row["question"]
        assert score("", problem, SAMPLE)["correct"] == 0, row["question"]
