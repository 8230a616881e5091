"""The reward `exact`: whether the final answers of response and problem are the same text."""

from __future__ import annotations

import re

from mtpctl.rl.rewards.outcome import Answered
from mtpctl.samples import Sample

_MARKED = re.compile(r"(?:(?<!\w)#|##)([^#]*[^#\s])\s*$")
"""The mark before a final answer, and the answer behind it."""


def score(response: str, problem: Answered, sample: Sample) -> float:
    """1.0 where the final answers of response and problem are the same text, else 0.0.

    An answer that is a worked solution, as in GSM8K, is read like a response: the text after its last `#` counts. A `#` that is part of a
    word (C#, F#m) marks no final answer; an answer with such a `#` is compared in full.
    """
    marked = _MARKED.search(problem.answer)
    if marked is None and "#" in problem.answer:
        return float(response.strip() == problem.answer.strip())
    return float(final_answer(response) == (problem.answer if marked is None else marked[1]).strip())


def final_answer(response: str) -> str:
    """The text after the last `#`, without blanks around it (42 of `#42` and of GSM8K's `#### 42`); the whole response without a `#`."""
    return response.rpartition("#")[2].strip()
