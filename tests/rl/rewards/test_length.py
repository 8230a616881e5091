"""`length`: another reward, less a penalty that grows with the policy's tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtpctl.data.problems import Problem
from mtpctl.errors import UserError
from mtpctl.rl.rewards import length
from mtpctl.samples import Sample

PROBLEM = Problem("p", "1+1=", "2")


def of_tokens(count: int) -> Sample:
    made = Sample("p", "0", [1])
    made.append([7] * count, [-1.0] * count, 0)
    made.append([8] * 50, [0.0] * 50, 0, trained=False)
    return made


@pytest.mark.parametrize(("tokens", "taken"), [(0, 0.0), (100, 0.0), (125, 0.25), (150, 0.5), (200, 1.0), (1000, 1.0)])
def test_with_a_maximum_the_penalty_grows_from_there_to_twice_as_many_tokens(tokens: int, taken: float) -> None:
    found = length.score("#2", PROBLEM, of_tokens(tokens), max=100, penalty=0.5)
    assert found == {"reward": 1.0 - 0.5 * taken, "correct": 1.0, "length": -0.5 * taken}


@pytest.mark.parametrize(("tokens", "taken"), [(100, 0.0), (50, 0.5), (150, 0.5), (0, 1.0), (300, 1.0)])
def test_with_a_target_it_grows_both_ways(tokens: int, taken: float) -> None:
    assert length.score("#3", PROBLEM, of_tokens(tokens), target=100)["reward"] == -taken


def test_it_takes_the_penalty_off_a_plain_function_of_ones_own_and_keeps_its_parts(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text("def score(response, problem, sample, by): return {'reward': 3 * by, 'tone': 0.5}")
    found = length.score("#3", PROBLEM, of_tokens(150), of=f"{tmp_path / 'judge.py'}:score", of_args={"by": 2}, max=100)
    assert found == {"reward": 5.5, "correct": 6.0, "length": -0.5, "tone": 0.5}


@pytest.mark.parametrize("args", [{}, {"max": 5, "target": 5}, {"max": 0}, {"of": "llm_judge", "max": 5}])
def test_arguments_that_make_no_sense_are_told(args: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"^reward\.args: "):
        length.score("#2", PROBLEM, of_tokens(1), **args)  # type: ignore[arg-type]
