"""The cursor walks every problem once an epoch, and goes on exactly where its state was taken."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mtpctl.data.problems import Problem, PromptCursor
from mtpctl.errors import UserError

PROBLEMS = [Problem(f"p{i}", f"{i}=", str(i)) for i in range(7)]


def test_every_epoch_is_another_permutation() -> None:
    cursor = PromptCursor(PROBLEMS, seed=1)
    first, second = cursor.take(7), cursor.take(7)
    assert first != second
    assert sorted(p.prompt_id for p in first) == sorted(p.prompt_id for p in second) == sorted(p.prompt_id for p in PROBLEMS)
    assert PromptCursor(PROBLEMS, seed=1).take(14) == first + second
    assert PromptCursor(PROBLEMS, seed=2).take(7) != first


def test_without_shuffle_the_order_is_the_files() -> None:
    assert PromptCursor(PROBLEMS, seed=1, shuffle=False).take(9) == PROBLEMS + PROBLEMS[:2]


def test_epoch_and_drawn_count() -> None:
    cursor = PromptCursor(PROBLEMS, seed=1)
    observed = []
    for _ in range(15):
        observed.append((cursor.epoch, cursor.drawn))
        next(cursor)
    assert [drawn for _, drawn in observed] == list(range(15))
    assert [epoch for epoch, _ in observed] == [0] * 7 + [1] * 7 + [2]


@pytest.mark.parametrize("before", [0, 3, 7, 11])
def test_resume(before: int) -> None:
    cursor = PromptCursor(PROBLEMS, seed=4)
    cursor.take(before)
    state = json.loads(json.dumps(cursor.state_dict()))
    resumed = PromptCursor(PROBLEMS, seed=4)
    resumed.load_state_dict(state)
    assert resumed.drawn == before
    assert resumed.take(20) == cursor.take(20)


def test_a_state_of_other_data_is_refused() -> None:
    state = PromptCursor(PROBLEMS, seed=4).state_dict()
    with pytest.raises(UserError, match=r"^seed: "):
        PromptCursor(PROBLEMS, seed=5).load_state_dict(state)
    with pytest.raises(UserError, match=r"^data\.path: "):
        PromptCursor([*PROBLEMS[:-1], replace(PROBLEMS[-1], answer="8")], seed=4).load_state_dict(state)
    with pytest.raises(UserError, match=r"^data\.shuffle: "):
        PromptCursor(PROBLEMS, seed=4, shuffle=False).load_state_dict(state)


def test_an_empty_set_is_refused() -> None:
    with pytest.raises(UserError, match="empty"):
        PromptCursor([], seed=0)
