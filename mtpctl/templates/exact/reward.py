"""The reward of mytask: is the answer right, and is there nothing but the answer?"""

from __future__ import annotations

from mtpctl.data.problems import Problem
from mtpctl.samples import Sample


def score(response: str, problem: Problem, sample: Sample, bonus: float = 0.0) -> dict[str, float]:
    """The key `reward` is what trains; every other key is logged as `reward/KEY`. A plain float would do as well."""
    words = response.split()
    right = float(bool(words) and words[0] == problem.answer)
    bare = float(words == [problem.answer])
    return {"reward": right + bonus * bare, "right": right, "bare": bare}
