"""The reward `length`: another reward minus a penalty that depends on the number of sampled tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtpctl.data.problems import Problem
from mtpctl.errors import UserError
from mtpctl.rl.rewards import built_in
from mtpctl.samples import Sample

PROBLEM = Problem("p", "1+1=", "2")


def of_tokens(count: int) -> Sample:
    sample = Sample("p", "0", [1])
    sample.append([7] * count, [-1.0] * count, 0)
    sample.append([8] * 50, [0.0] * 50, 0, trained=False)
    return sample


@pytest.mark.parametrize(("tokens", "share"), [(0, 0.0), (100, 0.0), (125, 0.25), (150, 0.5), (200, 1.0), (1000, 1.0)])
def test_penalty_grows_from_the_maximum_to_twice_as_many_tokens(tokens: int, share: float) -> None:
    result = built_in.length("#2", PROBLEM, of_tokens(tokens), max=100, penalty=0.5)
    assert result == {"reward": 1.0 - 0.5 * share, "correct": 1.0, "length": -0.5 * share}


@pytest.mark.parametrize(("tokens", "share"), [(100, 0.0), (50, 0.5), (150, 0.5), (0, 1.0), (300, 1.0)])
def test_penalty_grows_with_the_distance_from_the_target(tokens: int, share: float) -> None:
    assert built_in.length("#3", PROBLEM, of_tokens(tokens), target=100)["reward"] == -share


def test_penalty_is_subtracted_from_a_user_defined_function_and_parts_are_kept(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text("def score(response, problem, sample, by): return {'reward': 3 * by, 'tone': 0.5}")
    result = built_in.length("#3", PROBLEM, of_tokens(150), of=f"{tmp_path / 'judge.py'}:score", of_args={"by": 2}, max=100)
    assert result == {"reward": 5.5, "correct": 6.0, "length": -0.5, "tone": 0.5}


def test_part_correct_of_the_other_function_is_kept(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text("def score(response, problem, sample): return {'reward': 0.5, 'correct': 0.0}")
    result = built_in.length("#3", PROBLEM, of_tokens(150), of=f"{tmp_path / 'judge.py'}:score", max=100)
    assert result == {"reward": 0.0, "correct": 0.0, "length": -0.5}


@pytest.mark.parametrize("args", [{}, {"max": 5, "target": 5}, {"max": 0}, {"of": "llm_judge", "max": 5}])
def test_invalid_arguments_are_an_error(args: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"^reward\.args: "):
        built_in.length("#2", PROBLEM, of_tokens(1), **args)  # type: ignore[arg-type]
