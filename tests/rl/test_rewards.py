"""Checkers and length shaping."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from mtpctl.data.tasks import generate
from mtpctl.recipe.data import GeneratedTask
from mtpctl.recipe.rl import OverlongConfig
from mtpctl.rl.rewards import MathChecker, exact_checker, final_answer, make_checker, overlong_penalty


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("3+9+0=12 #12", "12", 1.0),
        ("#12 no, #13", "13", 1.0),
        ("#12 no, #13", "12", 0.0),
        (" 12\n", "12", 1.0),
        ("#### 42", "42", 1.0),
        ("#012", "12", 0.0),
        ("#", "12", 0.0),
        ("", "12", 0.0),
        # A worked answer is read as the response is; a # within a word marks nothing.
        ("48+24=72 #### 72", "48/2=24\n48+24=72\n#### 72", 1.0),
        ("…#### 72", "…#### 72", 1.0),
        ("#72", "so it is\n#### 72 ", 1.0),
        ("72", "#### 72", 1.0),
        ("#### 73", "…#### 72", 0.0),
        ("C#", "C#", 1.0),
        ("D#", "C#", 0.0),
        ("A#m", "F#m", 0.0),
        ("F#m", "F#m", 1.0),
        ("####", "####", 1.0),
    ],
)
def test_exact(response: str, answer: str, reward: float) -> None:
    assert exact_checker(response, answer) == reward


@pytest.mark.parametrize("name", ["addition", "subtraction", "multiplication", "reverse", "sort"])
def test_worked_solutions_of_generated_tasks_are_right_and_spoiled_ones_wrong(name: str) -> None:
    train, _ = generate(GeneratedTask(name=name, train_size=50, eval_size=5), seed=0)  # type: ignore[arg-type]
    assert make_checker("exact") is exact_checker
    for problem in train:
        assert exact_checker(problem.target, problem.answer) == 1.0
        assert exact_checker(problem.target + "0", problem.answer) == 0.0
        assert final_answer(problem.target) == problem.answer


@pytest.fixture(scope="module")
def math_checker() -> Iterator[MathChecker]:
    with MathChecker(timeout_s=1.0) as checker:
        yield checker


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        (r"so it is $\frac{1}{2}$", "0.5", 1.0),
        (r"\boxed{1/2}", r"\frac{1}{2}", 1.0),
        ("$1+x$", "x+1", 1.0),
        (r"\boxed{(1,2)}", "(1,2)", 1.0),
        (r"\boxed{(2,1)}", "(1,2)", 0.0),
        ("#### 1,000", "1000", 1.0),
        ("no idea", "3", 0.0),
        ("", "3", 0.0),
        ("a line\nand 7", "7", 1.0),
        # A bare answer is a whole expression, and not its first number.
        (r"\boxed{2\pi}", r"2\pi", 1.0),
        (r"\boxed{2}", r"2\pi", 0.0),
        (r"\boxed{3\sqrt{13}}", r"3\sqrt{13}", 1.0),
        (r"\boxed{x^2+1}", "1+x^2", 1.0),
        (r"\boxed{6-5i}", "6-5i", 1.0),
        (r"\boxed{1, 2}", "1, 2", 1.0),
        (r"\boxed{-5}", "\N{MINUS SIGN}5", 1.0),
        (r"\boxed{18}", "18 dollars", 1.0),
        (r"\boxed{18}", r"\$18", 1.0),
        (r"\boxed{42}", "4 and 38 make #### 42", 1.0),
        # The last box counts, with those that it makes a list with.
        (r"\boxed{41}, no: \boxed{42}", "42", 1.0),
        (r"\boxed{42}, no: \boxed{41}", "42", 0.0),
        (r"$\boxed{1}$ and $\boxed{2}$", "1, 2", 1.0),
        (r"\boxed{\frac{1}{2}} or \boxed{", "0.5", 1.0),
        ("9+3+0=12 #12", "12", 1.0),
        ("4*12=48 3*12=36 #408", "408", 1.0),
    ],
)
def test_math(math_checker: MathChecker, response: str, answer: str, reward: float) -> None:
    assert math_checker(response, answer) == reward


def test_math_that_would_take_for_ever_is_given_up_in_any_thread(math_checker: MathChecker) -> None:
    rewards: list[float] = []
    before = math_checker.timeouts
    thread = threading.Thread(target=lambda: rewards.append(math_checker("$10^{10^{10^{10}}}$", "3")))
    thread.start()
    thread.join(timeout=20)
    assert rewards == [0.0]
    assert math_checker.timeouts == before + 1
    assert math_checker("$4$", "4") == 1.0


def test_a_worker_that_dies_is_replaced(math_checker: MathChecker) -> None:
    assert math_checker("$4$", "4") == 1.0
    worker = math_checker._worker
    assert worker is not None
    worker.kill()
    worker.wait(timeout=10)
    assert math_checker("$4$", "4") == 1.0


def test_a_worker_that_never_answers_is_killed(math_checker: MathChecker) -> None:
    import os
    import signal

    assert math_checker("$4$", "4") == 1.0
    worker = math_checker._worker
    assert worker is not None
    os.kill(worker.pid, signal.SIGSTOP)
    assert math_checker("$4$", "4") == 0.0
    assert worker.poll() is not None
    assert math_checker("$4$", "4") == 1.0


def test_closing_leaves_no_process() -> None:
    checker = MathChecker()
    checker("$4$", "4")
    worker = checker._worker
    assert worker is not None
    checker.close()
    assert worker.poll() is not None
    checker.close()


def test_overlong() -> None:
    config = OverlongConfig(enabled=True, buffer=20, penalty=2.0)
    lengths = [0, 80, 85, 90, 100, 120]
    assert [overlong_penalty(n, 100, config) for n in lengths] == [0.0, 0.0, -0.5, -1.0, -2.0, -2.0]
    assert overlong_penalty(100, 100, OverlongConfig(enabled=False)) == 0.0
