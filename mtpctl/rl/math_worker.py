"""The process in which `MathChecker` runs math-verify: a line of JSON in, a line of JSON out, until the input closes.

Standard output belongs to the replies; whatever the libraries print goes to standard error.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
from typing import TypedDict

WARM_UP_S = 60.0


class Request(TypedDict):
    """One line of input: a response, the answer to compare it with, and the seconds that parsing or comparing may take."""

    response: str
    answer: str
    timeout_s: float


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


def compare(response: str, answer: str, timeout_s: float) -> dict[str, bool]:
    """Whether the response's last expression equals the answer; `timed_out` where parsing or comparing took too long."""
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    seconds = math.ceil(timeout_s)
    try:
        for text in answer_forms(answer):
            if gold := parse(text, parsing_timeout=seconds, raise_on_error=True):
                break
        given = parse(final_part(response), parsing_timeout=seconds, raise_on_error=True)
        return {"equal": bool(gold) and verify(gold, given, timeout_seconds=seconds, raise_on_error=True), "timed_out": False}
    except TimeoutException:
        return {"equal": False, "timed_out": True}
    except Exception:  # sympy raises whatever it likes on what is no mathematics, and that is simply not the answer
        logging.getLogger(__name__).debug("not comparable: %r and %r", response[-200:], answer, exc_info=True)
        return {"equal": False, "timed_out": False}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    compare("$1$", "1", WARM_UP_S)  # loads the parsers, for which no response's deadline pays

    replies.write("{}\n")
    for line in sys.stdin:
        request: Request = json.loads(line)
        replies.write(json.dumps(compare(request["response"], request["answer"], request["timeout_s"])) + "\n")


if __name__ == "__main__":
    main()
