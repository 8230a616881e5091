"""The reward of mytask: is the last word the right code, and was the tool asked?"""

from __future__ import annotations

from mtpctl.data.problems import Problem
from mtpctl.samples import Sample


def score(response: str, problem: Problem, sample: Sample, unasked: float = 0.5) -> dict[str, float]:
    """`response` is the text of the whole response, the tool's replies included; `unasked` is what a right guess gets."""
    right = float(response.rpartition("]")[2].strip() == problem.answer)
    asked = float(0 in sample.loss_mask)  # tokens that are not the model's: the tool's
    return {"reward": right * (1.0 if asked else unasked), "right": right, "asked": asked}
