"""Replies of the tool and rewards of mytask. Run `pytest` in this folder."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from environment import Coder
from reward import score

from mtpctl.data.problems import Problem
from mtpctl.samples import Sample

ROWS = [json.loads(line) for name in ("rows.jsonl", "held_out.jsonl") for line in Path(__file__).with_name(name).read_text().splitlines()]
PROBLEM = Problem("rows.jsonl:1", "code of bed:", "cfe")


def replies(*turns: str) -> list[str | None]:
    coder = Coder(PROBLEM, shift=1, calls=2)
    return [asyncio.run(coder.reply(turn)) for turn in turns]


def rewarded(response: str, answer: str, mask: list[int]) -> float:
    sample = Sample("rows.jsonl:1", "group", [1], loss_mask=mask)
    return score(response, Problem("rows.jsonl:1", "code of bed:", answer), sample)["reward"]


def test_tool_encodes_words_and_ends_the_response_after_its_calls() -> None:
    assert replies("<call>bed</call>", "so <call>zoo</call>", "<call>bed</call>") == ["[cfe]", "[app]", None]
    assert replies("bed</call>") == [None]


@pytest.mark.parametrize(
    ("response", "mask", "reward"),
    [("<call>bed</call>[cfe]cfe", [1, 0, 1], 1.0), ("cfe", [1], 0.5), ("<call>bed</call>[cfe]bed", [1, 0, 1], 0.0), ("", [], 0.0)],
)
def test_reward_of_a_response(response: str, mask: list[int], reward: float) -> None:
    assert rewarded(response, "cfe", mask) == reward


def test_solution_of_every_row_matches_the_tool_and_has_the_full_reward() -> None:
    for row in ROWS:
        call = row["solution"].partition("[")[0]
        assert row["solution"] == f"{call}{replies(call)[0]}{row['answer']}"
        assert rewarded(row["solution"], row["answer"], [1, 0, 1]) == 1.0
