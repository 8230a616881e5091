"""The reward `math`: whether the last expression of a response equals the answer, by the library math-verify.

The library would bound its time by the clock, in which little may be computed on a busy machine; here CPU seconds count, and of the clock's
four times as many, so that a right answer is right whatever else runs. Signals come to main threads alone: workers run reward functions in
theirs. Where sympy is stuck in C, which no Python signal reaches, `reward.timeout_s` ends the worker.
"""

from __future__ import annotations

import contextlib
import logging
import re
import signal
from collections.abc import Iterator

from math_verify import parse, verify
from math_verify.errors import TimeoutException

from mtpctl.compat import sympy_names
from mtpctl.rl.rewards.outcome import Answered
from mtpctl.samples import Sample

sympy_names.install()
# It warns where it is given no bound of its own.
logging.getLogger("math_verify").setLevel(logging.ERROR)
_WARM_UP_S = 60.0
_OF_THE_CLOCK = 4

_ENVIRONMENT = re.compile(r"(?<!\\)\$|[#\n]|\\boxed|\\\(|\\\[")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|operatorname|begin|end)\s*\{[^{}]*\}")
_JOINS = re.compile(r"[\s$]*(?:,|;|and|or|,\s*and|,\s*or)?[\s$]*")


def answer_forms(answer: str) -> list[str]:
    """How an answer is read, best first.

    Outside of an environment the library takes the first or last number that it sees (of `2\\pi` the 2), so that a bare
    expression is given one. What holds words ("18 dollars") is read as text first.
    """
    bare = f"${answer}$"
    text = _ENVIRONMENT.search(answer) or _WORD.search(_TEXT.sub("", answer))
    return [answer, bare] if text else [bare, answer]


def final_part(response: str) -> str:
    """The last box of a response, with those that stand before it in one list; the whole response where there is none.

    The library would join all boxes of a line to a set, those that the response has taken back among them.
    """
    start, end = None, None
    for box in reversed(list(re.finditer(r"\\boxed\{", response))):
        close = _closing(response, box.end())
        if close is None or (start is not None and not _JOINS.fullmatch(response[close:start])):
            break
        start, end = box.start(), end or close
    # A number right behind `#` is no number to the library.
    return re.sub(r"#(?=[^\s#])", "# ", response) if start is None else response[start:end]


def _closing(text: str, at: int) -> int | None:
    """Behind the brace that closes the one before `at`."""
    depth = 1
    for place in range(at, len(text)):
        if text[place] in "{}" and text[place - 1] != "\\":
            depth += 1 if text[place] == "{" else -1
        if not depth:
            return place + 1
    return None


def score(response: str, problem: Answered, sample: Sample, seconds: float = 5.0) -> float:
    """1.0 where the response's last expression equals the answer; 0.0 where not, and where reading or comparing computes over `seconds`."""
    return float(_equal(response, problem.answer, seconds))


def _equal(response: str, answer: str, seconds: float) -> bool:
    try:
        gold: list[object] = []
        for text in answer_forms(answer):
            with _bounded(seconds):
                gold = parse(text, parsing_timeout=None, raise_on_error=True)
            if gold:
                break
        with _bounded(seconds):
            given = parse(final_part(response), parsing_timeout=None, raise_on_error=True)
        with _bounded(seconds):
            return bool(gold) and bool(verify(gold, given, timeout_seconds=None, raise_on_error=True))
    except TimeoutException:
        return False
    except Exception:  # sympy raises whatever it likes on what is no mathematics, and that is simply not the answer
        logging.getLogger(__name__).debug("not comparable: %r and %r", response[-200:], answer, exc_info=True)
        return False


@contextlib.contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """Raise TimeoutException where the body computes for more than so many CPU seconds."""

    def over(*_: object) -> None:
        raise TimeoutException

    bounds = ((signal.ITIMER_PROF, signal.SIGPROF, seconds), (signal.ITIMER_REAL, signal.SIGALRM, _OF_THE_CLOCK * seconds))
    before = [signal.signal(number, over) for _, number, _ in bounds]
    try:
        for timer, _, limit in bounds:
            signal.setitimer(timer, limit)
        yield
    finally:
        for (timer, number, _), handler in zip(bounds, before, strict=True):
            signal.setitimer(timer, 0.0)
            signal.signal(number, handler)


# A process reads its first fraction, root or set a hundred times as slowly as the next ones: parsers and sympy load what they need then.
# So each kind is read once when this module is imported, which is before workers are forked.
for _text in (
    "1",
    r"\frac{1}{2}",
    r"3\sqrt{13}",
    "x^2+2x+1",
    "(1,2)",
    r"\{1,2\}",
    "[0,1)",
    "x=3",
    "x<2",
    "6-5i",
    r"2\pi",
    r"\sin x",
    r"50\%",
    "1,000",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
):
    _equal(rf"\boxed{{{_text}}}", _text, _WARM_UP_S)
    _equal(rf"\boxed{{{_text}}}", r"\frac{x}{7}+1", _WARM_UP_S)
