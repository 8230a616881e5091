"""Generated problems: right, disjoint, repeatable, evenly long."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from mtpctl.data.problems import Problem
from mtpctl.data.tasks import generate
from mtpctl.errors import UserError
from mtpctl.recipe.data import GeneratedTask

TASKS = ["addition", "subtraction", "multiplication", "reverse", "sort"]


def truth(name: str, prompt: str) -> str:
    """The answer, worked out from the prompt by other means than the generator's."""
    body = prompt.removesuffix("=")
    if name in ("reverse", "sort"):
        return "".join(reversed(body)) if name == "reverse" else "".join(sorted(body))
    a, b = (int(x) for x in re.split(r"[-+*]", body))
    return str({"addition": a + b, "subtraction": a - b, "multiplication": a * b}[name])


@pytest.mark.parametrize("name", TASKS)
def test_answers_are_right_and_solutions_end_in_them(name: str) -> None:
    train, held_out = generate(GeneratedTask(name=name, max_digits=5, train_size=500, eval_size=100), seed=3)
    for problem in [*train, *held_out]:
        assert problem.answer == truth(name, problem.prompt)
        assert problem.target.split("#")[1] == problem.answer


def test_each_addition_step_carries_into_the_next() -> None:
    train, _ = generate(GeneratedTask(name="addition", min_digits=4, max_digits=4, train_size=300), seed=0)
    for problem in train:
        carry = 0
        for step in problem.target.split(" ")[:-1]:
            x, y, c, total = (int(part) for part in re.split(r"[+=]", step))
            assert (c, total) == (carry, x + y + c)
            carry = total // 10
    assert any("1=" in problem.target for problem in train), "no problem carries"


def test_the_worked_solutions_are_these() -> None:
    from mtpctl.data import tasks

    assert tasks._addition(3, 23 * 900 + 889).steps == ["3+9+0=12", "2+8+1=11", "1+9+1=11"]
    pair = (523 - 100) * (523 - 100 + 1) // 2 + (189 - 100)
    assert tasks._subtraction(3, pair).steps == ["3-9-0=14", "2-8-1=13", "5-1-1=03"]
    assert tasks._multiplication(2, 2 * 90 + 24).steps == ["4*12=48", "3*12=36"]


@pytest.mark.parametrize("name", TASKS)
def test_train_and_held_out_are_disjoint_if_all_problems_are_used(name: str) -> None:
    train, held_out = generate(GeneratedTask(name=name, min_digits=1, max_digits=2, train_size=60, eval_size=30), seed=1)
    prompts = [problem.prompt for problem in [*train, *held_out]]
    assert len(train) == 60 and len(held_out) == 30
    assert len(set(prompts)) == len(prompts)
    ids = [problem.prompt_id for problem in [*train, *held_out]]
    assert len(set(ids)) == len(ids)


def test_both_splits_have_the_same_mix_of_lengths_and_rise() -> None:
    train, held_out = generate(GeneratedTask(name="addition", max_digits=4, train_size=9000, eval_size=900), seed=0)

    def lengths(problems: list[Problem]) -> list[int]:
        return [len(problem.prompt.split("+")[0]) for problem in problems]

    for split in (train, held_out):
        assert lengths(split) == sorted(lengths(split))
    shares = {n: count / len(train) for n, count in Counter(lengths(train)).items()}
    held_shares = {n: count / len(held_out) for n, count in Counter(lengths(held_out)).items()}
    assert shares[1] == pytest.approx(91 / 9000), "all one-digit sums but the held-out ones"
    assert shares[2] == pytest.approx(shares[4], abs=0.01)
    assert held_shares == pytest.approx(shares, abs=0.01)


def test_a_decay_gives_few_long_problems_among_many_short_ones_in_both_splits() -> None:
    task = GeneratedTask(name="reverse", min_digits=4, max_digits=12, length_decay=0.5, train_size=5110, eval_size=511)
    train, held_out = generate(task, seed=0)
    for split, whole in ((train, 5110), (held_out, 511)):
        counts = Counter(len(problem.prompt) - 1 for problem in split)
        expected = {n: whole * 0.5 ** (n - 4) / (2 - 0.5**8) for n in range(4, 13)}
        assert counts == pytest.approx(expected, abs=9), "rounding alone moves the counts"
    assert len(train) == 5110 and len(held_out) == 511


def test_long_problems_fill_the_rest_under_strong_decay() -> None:
    task = GeneratedTask(name="reverse", min_digits=1, max_digits=3, length_decay=1e-200, train_size=790, eval_size=10)
    train, held_out = generate(task, seed=0)
    counts = Counter(len(problem.prompt) - 1 for problem in [*train, *held_out])
    assert counts == {1: 26, 2: 26**2, 3: 800 - 26 - 26**2}


def test_generated_problems_depend_only_on_the_seed() -> None:
    task = GeneratedTask(name="addition", min_digits=3, train_size=50, eval_size=10)
    assert generate(task, 5) == generate(task, 5)
    assert generate(task, 5) != generate(task, 6)


def test_operands_of_30_digits_have_exact_answers() -> None:
    train, _ = generate(GeneratedTask(name="subtraction", min_digits=30, max_digits=30, train_size=20, eval_size=5), seed=0)
    assert all(problem.answer == truth("subtraction", problem.prompt) for problem in train)


def test_too_few_problems_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match=r"data\.task\.train_size.*100 distinct"):
        generate(GeneratedTask(name="addition", max_digits=1, train_size=95, eval_size=10), seed=0)
    with pytest.raises(UserError, match=r"data\.task\.min_digits"):
        generate(GeneratedTask(name="addition", min_digits=4, max_digits=3), seed=0)
