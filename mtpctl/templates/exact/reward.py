"""The reward of mytask: 1 for the correct answer, and a bonus if the response contains nothing else."""

from __future__ import annotations

from mtpctl.data.problems import Problem
from mtpctl.samples import Sample


def score(response: str, problem: Problem, sample: Sample, bonus: float = 0.0) -> dict[str, float]:
    """Returns `reward`, which is trained on, and parts that are logged as `reward/PART`. Evaluations count `correct` instead of `reward`.

    It may also return a float.
    """
    words = response.split()
    correct = float(bool(words) and words[0] == problem.answer)
    bare = float(words == [problem.answer])
    return {"reward": correct + bonus * bare, "correct": correct, "bare": bare}
