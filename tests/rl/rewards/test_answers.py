"""The reward `exact`: which responses are correct."""

from __future__ import annotations

import pytest

from mtpctl.data.problems import Problem
from mtpctl.data.tasks import generate
from mtpctl.recipe.data import GeneratedTask
from mtpctl.rl.rewards.built_in import exact
from mtpctl.samples import Sample

SAMPLE = Sample("p", "0", [1])


def problem(answer: str) -> Problem:
    return Problem("p", "what?", answer)


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
        # A worked solution is parsed like a response. A # within a word is no mark.
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
def test_exact_compares_final_answers(response: str, answer: str, reward: float) -> None:
    assert exact(response, problem(answer), SAMPLE) == reward


@pytest.mark.parametrize("name", ["addition", "subtraction", "multiplication", "reverse", "sort"])
def test_solutions_of_generated_tasks_are_correct_and_altered_ones_wrong(name: str) -> None:
    train, _ = generate(GeneratedTask(name=name, train_size=50, eval_size=5), seed=0)  # type: ignore[arg-type]
    for each in train:
        assert exact(each.target, each, SAMPLE) == 1.0
        assert exact(each.target + "0", each, SAMPLE) == 0.0
