"""The process in which `MathChecker` runs math-verify: a line of JSON in, a line of JSON out, until the input closes.

Standard output belongs to the replies; whatever the libraries print goes to standard error.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from typing import Any

WARM_UP_S = 60.0


def compare(response: str, answer: str, timeout_s: float) -> dict[str, bool]:
    """Whether the response's last expression equals the answer; `timed_out` where parsing or comparing took too long."""
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    seconds = math.ceil(timeout_s)
    try:
        # Answers come bare ("1/2", "x+1"): the library looks for LaTeX inside an environment.
        gold = parse(answer, parsing_timeout=seconds, raise_on_error=True)
        gold = gold or parse(f"${answer}$", parsing_timeout=seconds, raise_on_error=True)
        given = parse(response, parsing_timeout=seconds, raise_on_error=True)
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
        request: dict[str, Any] = json.loads(line)
        replies.write(json.dumps(compare(request["response"], request["answer"], request["timeout_s"])) + "\n")


if __name__ == "__main__":
    main()
