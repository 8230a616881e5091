"""Rewards of mytask. Run `pytest` in this folder."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from reward import grade_in, score

from mtpctl.data.problems import Problem
from mtpctl.samples import Sample

ROWS = [json.loads(line) for name in ("rows.jsonl", "held_out.jsonl") for line in Path(__file__).with_name(name).read_text().splitlines()]
SAMPLE = Sample("rows.jsonl:1", "group", [1])


def rewarded(response: str, example: str = "kite") -> float:
    return asyncio.run(score(response, Problem("rows.jsonl:1", "a word that begins with k:", example), SAMPLE))


@pytest.mark.parametrize(("response", "reward"), [("kite", 1.0), (" kettle ", 1.0), ("bread", 0.5), ("k", 0.0), ("kite!", 0.0), ("", 0.0)])
def test_response_is_graded_by_rule_without_a_server(response: str, reward: float) -> None:
    assert rewarded(response) == reward


@pytest.mark.parametrize(("text", "grade"), [("7", 0.7), ("Grade: 10", 1.0), ("12", 1.0), ("good", 0.0)])
def test_grade_is_parsed_from_the_reply(text: str, grade: float) -> None:
    assert grade_in(text) == grade


def test_example_of_every_row_has_the_full_reward() -> None:
    assert {rewarded(row["example"], row["example"]) for row in ROWS} == {1.0}
