"""Rewards of mytask. Run `pytest` in this folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from reward import score

from mtpctl.data.problems import Problem
from mtpctl.samples import Sample

ROWS = [json.loads(line) for name in ("rows.jsonl", "held_out.jsonl") for line in Path(__file__).with_name(name).read_text().splitlines()]
SAMPLE = Sample("rows.jsonl:1", "group", [1])


def rewarded(response: str, answer: str = "d") -> float:
    return score(response, Problem("rows.jsonl:1", "last letter of bread:", answer), SAMPLE, bonus=0.25)["reward"]


@pytest.mark.parametrize(("response", "reward"), [("d", 1.25), ("d, I think", 0.0), ("d it is", 1.0), ("x", 0.0), ("", 0.0)])
def test_reward_of_a_response(response: str, reward: float) -> None:
    assert rewarded(response) == reward


def test_answer_of_every_row_has_the_full_reward() -> None:
    assert {rewarded(row["answer"], row["answer"]) for row in ROWS} == {1.25}
