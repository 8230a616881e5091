"""The reward `math`: whether the answer that a response states equals the answer of its row.

`final_answer` cuts the answers out of the texts, `answer_value` reads them, and `answer_equality` compares them: numbers exactly, several
values as a whole, and other expressions by the library math-verify.

The library limits wall-clock time, in which little may be computed on a busy machine. Here CPU time is limited, and wall-clock time to four
times that, so that the verdict does not depend on the load. Only main threads receive signals, so workers run reward functions in theirs.
If sympy hangs in C code, which Python signals do not interrupt, `reward.timeout_s` ends the worker.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Iterator
from functools import lru_cache

from math_verify.errors import TimeoutException

from mtpctl.compat import sympy_names
from mtpctl.rl.rewards.answer_equality import equal
from mtpctl.rl.rewards.answer_value import Value, readings
from mtpctl.rl.rewards.final_answer import answer_texts
from mtpctl.rl.rewards.outcome import Answered
from mtpctl.samples import Sample

sympy_names.install()
# The library warns if it is passed no time limit.
logging.getLogger("math_verify").setLevel(logging.ERROR)
_WARM_UP_S = 60.0
_OF_THE_CLOCK = 4


def score(response: str, problem: Answered, sample: Sample, seconds: float = 5.0) -> float:
    """1.0 if the answer that the response states equals the row's; 0.0 if not, or after `seconds` of CPU time."""
    return float(_equal(response, problem.answer, seconds))


def _equal(response: str, answer: str, seconds: float) -> bool:
    try:
        with _bounded(seconds):
            gold = _gold(answer)
        with _bounded(seconds):
            stated = _stated(response)
    except TimeoutException:
        return False
    except Exception:
        logging.getLogger(__name__).debug("not readable: %r or %r", response[-200:], answer, exc_info=True)
        return False
    return any(_compare(one, other, seconds) for one in gold for other in stated)


def _compare(gold: Value, stated: Value, seconds: float) -> bool:
    try:
        with _bounded(seconds):
            return equal(gold, stated)
    except TimeoutException:
        return False
    except Exception:  # the library and sympy raise various errors for texts that are not mathematics; these are wrong answers
        logging.getLogger(__name__).debug("not comparable: %r and %r", gold, stated, exc_info=True)
        return False


@lru_cache(maxsize=512)
def _gold(answer: str) -> tuple[Value, ...]:
    """The readings of a row's answer. A worked solution is read like a response."""
    return readings(answer) if _is_bare(answer) else _stated(answer) or readings(answer)


def _is_bare(answer: str) -> bool:
    return len(answer) <= 200 and "boxed" not in answer and "#" not in answer and "\n" not in answer.strip()


def _stated(response: str) -> tuple[Value, ...]:
    """The readings of the first of the possible answer texts that states a value; if none does, of the first that is a text."""
    texts: tuple[Value, ...] = ()
    for text in answer_texts(response):
        values = readings(text)
        if any(value.stated for value in values):
            return values
        texts = texts or values
    return texts


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
