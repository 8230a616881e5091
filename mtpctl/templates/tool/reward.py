"""The reward of mytask: whether the last word is the correct code, and whether the tool was called."""

from __future__ import annotations

from mtpctl.data.problems import Problem
from mtpctl.samples import Sample


def score(response: str, problem: Problem, sample: Sample, guessed: float = 0.5) -> dict[str, float]:
    """`response`: the text of the whole response, including replies of the tool. `guessed`: reward of a correct code without a call."""
    right = float(response.rpartition("]")[2].strip() == problem.answer)
    called = float(0 in sample.loss_mask)  # tokens of the tool are masked
    return {"reward": right * (1.0 if called else guessed), "right": right, "called": called}
