"""The reward `exact`: whether the final answers of response and problem are the same text."""

from __future__ import annotations

import re

from mtpctl.rl.rewards.function import Answered
from mtpctl.samples import Sample

_MARKED = re.compile(r"(?:(?<!\w)#|##)([^#]*[^#\s])\s*$")
"""The marker of a final answer, and the answer after it."""


def score(response: str, problem: Answered, sample: Sample) -> float:
    """1.0 if the final answers of response and problem are the same text, else 0.0.

    An answer that is a worked solution, as in GSM8K, is parsed like a response: the text after its last `#` counts. A `#` that is part of a
    word (C#, F#m) marks no final answer; an answer with such a `#` is compared in full.
    """
    marked = _MARKED.search(problem.answer)
    if marked is None and "#" in problem.answer:
        return float(response.strip() == problem.answer.strip())
    # 42 in `#42` and in GSM8K's `#### 42`; the whole response if it has no `#`.
    answer = response.rpartition("#")[2].strip()
    return float(answer == (problem.answer if marked is None else marked[1]).strip())
