"""The reward of mytask: reasoning-gym's own score of the answer that a response states."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from mtpctl.data.problems import Problem
from mtpctl.samples import Sample

with warnings.catch_warnings():
    warnings.simplefilter("ignore", SyntaxWarning)  # of a package that it imports
    from reasoning_gym import get_score_answer_fn

TASK = "chain_sum"
_STATED = re.compile(r"\banswer\b[^.\n]{0,80}?\b(?:is|are)\b[:\s$*]*", re.IGNORECASE)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_SENTENCE_END = re.compile(r"\.(?:\s|$)|\n")


def score(response: str, problem: Problem, sample: Sample, partial: bool = False) -> dict[str, float]:
    """1 for an answer with reasoning-gym's full score.

    partial: return reasoning-gym's score itself. Many of its scorers give partial credit to any text that contains the answer, so a model
    learns to write long answers instead of right ones.
    """
    entry = {"question": problem.prompt, "answer": problem.answer, "metadata": problem.fields["metadata"]}
    value = float(_scorer(TASK)(stated_answer(response, problem.answer), entry))
    return {"reward": value if partial else float(value >= 1), "gym": value}


def stated_answer(response: str, answer: str) -> str | None:
    """The text after the last "the answer is", or the last number if no answer is stated.

    The text ends with its sentence, unless the correct `answer` itself has several sentences or lines.
    """
    parts = _STATED.split(response)
    if len(parts) == 1:
        numbers = _NUMBER.findall(response)
        return numbers[-1] if numbers else None
    text = parts[-1] if "\n" in answer or _SENTENCE_END.search(answer) else _SENTENCE_END.split(parts[-1])[0]
    text = text.strip().rstrip("$*").strip()
    # "The answer is 12 - 5 = 7" states 7.
    return text if "=" in answer else text.rpartition("=")[2].strip()


@lru_cache
def _scorer(task: str) -> Callable[[str | None, dict[str, Any]], float]:
    scorer: Callable[[str | None, dict[str, Any]], float] = get_score_answer_fn(task)
    return scorer
