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


def score(response: str, problem: Problem, sample: Sample, partial: bool = False, steps: float = 0.0) -> dict[str, float]:
    """1 for an answer with reasoning-gym's full score. Held-out accuracy counts the part `correct`, which has no partial credit.

    partial: return reasoning-gym's score itself. Many of its scorers give partial credit to any text that contains the answer, so a model
    learns to write long answers instead of right ones.
    steps: share of the reward for writing down the calculation of a sum (`shown_steps`). Raises ValueError for a task other than chain_sum.
    """
    metadata: Any = problem.fields["metadata"]
    entry = {"question": problem.prompt, "answer": problem.answer, "metadata": metadata}
    value = float(_scorer(TASK)(stated_answer(response, problem.answer), entry))
    correct = float(value >= 1)
    parts = {"reward": value if partial else correct, "correct": correct, "gym": value}
    if steps:
        if TASK != "chain_sum":
            raise ValueError(f"steps: only sums have steps, and the task is {TASK}; remove reward.args.steps")
        parts["shown"] = shown_steps(response, metadata["expression"])
        parts["reward"] = (1 - steps) * parts["reward"] + steps * parts["shown"]
    return parts


def shown_steps(response: str, expression: str) -> float:
    """Mean credit, between 0 and 1, of the equations that calculate a sum from left to right; 0 for a single term.

    For `84 - 55 + 10` they are `84 - 55 = R` and `R + 10 = S`, with the R that the response states. An equation has a credit of 1 if it is
    true and its result is that of the sum so far (29, 39), of 0.3 if only the sign of its result is right, and of 0.1 otherwise. Without
    credit for the sign, a model that hardly ever writes negative results may never learn to. Equations after the answer do not count.
    """
    first, *rest = expression.split()
    stated = partial_sum = int(first)
    position, credit = 0, 0.0
    steps = list(zip(rest[::2], map(int, rest[1::2]), strict=True))
    text = _plain_numbers(_until_answer(response))
    for operator, term in steps:
        change = term if operator == "+" else -term
        result, partial_sum = stated + change, partial_sum + change
        left = rf"(?<![\d,-])(?<![+*/-] ){stated} *\{operator} *{term}"
        equation = re.compile(rf"{left} *= *\$?(-? ?\d{{1,15}})(?!\.?\d)").search(text, position)
        if equation is None:
            break
        stated, position = int(equation[1].replace(" ", "")), equation.start(1)
        if stated == result == partial_sum:
            credit += 1.0
        else:
            credit += 0.3 if (stated < 0) == (result < 0) else 0.1
    return credit / max(1, len(steps))


def _until_answer(response: str) -> str:
    """The response up to the end of the sentence that states the answer."""
    stated = list(_STATED.finditer(response))
    end = _SENTENCE_END.search(response, stated[-1].end()) if stated else None
    return response[: end.start()] if end else response


def _plain_numbers(text: str) -> str:
    """The text without bold type, thousands separators and parentheses around numbers."""
    text = text.replace("**", "").replace("\u2212", "-")
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return re.sub(r"\((-? ?\d+)\)", r"\1", text)


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
