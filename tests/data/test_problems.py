"""The cursor draws every problem once per epoch, and continues exactly from a saved state."""

from __future__ import annotations

import json
from collections.abc import Callable
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
def test_resumed_cursor_continues_with_the_next_problem(before: int) -> None:
    cursor = PromptCursor(PROBLEMS, seed=4)
    cursor.take(before)
    state = json.loads(json.dumps(cursor.state_dict()))
    resumed = PromptCursor(PROBLEMS, seed=4)
    resumed.load_state_dict(state)
    assert resumed.drawn == before
    assert resumed.take(20) == cursor.take(20)


def epochs_drawn(cursor: PromptCursor, problem: Problem, epochs: int, signal: Callable[[int], bool]) -> list[int]:
    """The epochs that draw `problem`, whose group in epoch e has `signal(e)`. All other groups have signal."""
    drawn = []
    while cursor.epoch < epochs:
        epoch, each = cursor.epoch, next(cursor)
        if each is problem:
            drawn.append(epoch)
        cursor.record_signal(each, signal=each is not problem or signal(epoch))
    return drawn


def test_problem_without_signal_is_skipped_for_1_3_7_epochs_until_it_has_signal() -> None:
    cursor = PromptCursor(PROBLEMS, seed=1, backoff=True)
    drawn = epochs_drawn(cursor, PROBLEMS[3], 16, lambda epoch: epoch == 6)
    assert drawn == [0, 2, 6, 7, 9, 13]
    assert cursor.drawn == 16 * 6 + len(drawn)


def test_at_most_15_epochs_are_skipped() -> None:
    cursor = PromptCursor(PROBLEMS, seed=1, backoff=True)
    assert epochs_drawn(cursor, PROBLEMS[3], 64, lambda _: False) == [0, 2, 6, 14, 30, 46, 62]


def test_skipped_epochs_count_from_the_draw_if_the_group_completes_in_the_next_epoch() -> None:
    cursor = PromptCursor(PROBLEMS, seed=1, backoff=True)
    last = cursor.take(7)[-1]
    cursor.take(3)
    cursor.record_signal(last, signal=False)
    assert last not in cursor.take(4)
    assert last in cursor.take(7)


def test_without_backoff_every_problem_is_drawn_in_every_epoch() -> None:
    assert epochs_drawn(PromptCursor(PROBLEMS, seed=1), PROBLEMS[3], 5, lambda _: False) == [0, 1, 2, 3, 4]


def test_problems_are_drawn_even_if_all_would_be_skipped() -> None:
    cursor = PromptCursor(PROBLEMS, seed=1, backoff=True)
    for problem in cursor.take(7):
        cursor.record_signal(problem, signal=False)
    assert len(cursor.take(3)) == 3 and cursor.drawn == 10


def test_a_resumed_cursor_skips_the_same_problems() -> None:
    cursor = PromptCursor(PROBLEMS, seed=4, backoff=True)
    for problem in cursor.take(9):
        cursor.record_signal(problem, signal=problem.answer in "246")
    state = json.loads(json.dumps(cursor.state_dict()))
    resumed, without = PromptCursor(PROBLEMS, seed=4, backoff=True), PromptCursor(PROBLEMS, seed=4)
    resumed.load_state_dict(state)
    without.load_state_dict(state)
    assert resumed.drawn == without.drawn == 9
    assert sorted(problem.prompt_id for problem in without.take(5)) == sorted({p.prompt_id for p in PROBLEMS} - first_two_of_epoch_1())
    assert resumed.take(30) == cursor.take(30)


def first_two_of_epoch_1() -> set[str]:
    return {problem.prompt_id for problem in PromptCursor(PROBLEMS, seed=4).take(9)[7:]}


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
