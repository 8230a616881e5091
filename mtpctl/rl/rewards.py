"""Rewards: checkers that compare a response with the answer, and DAPO's penalty for long responses.

A checker takes the text of the response and the answer, and returns 1.0 or 0.0. It may be called from any thread.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from types import TracebackType
from typing import Literal

from mtpctl.errors import EnvironmentMissing
from mtpctl.recipe.rl import OverlongConfig

Checker = Callable[[str, str], float]

_MARKED = re.compile(r"(?:(?<!\w)#|##)([^#]*[^#\s])\s*$")
"""The mark before a final answer, and the answer behind it."""

_START_S = 120.0
"""Seconds that the math worker has to import sympy, also on a busy machine."""


def final_answer(response: str) -> str:
    """The text after the last `#`, without blanks around it (42 of `#42` and of GSM8K's `#### 42`); the whole response without a `#`."""
    return response.rpartition("#")[2].strip()


def exact_checker(response: str, answer: str) -> float:
    """1.0 where the final answers of response and answer are the same text.

    An answer that is a worked solution, as in GSM8K, is read like a response: the text after its last `#` counts. A `#` that is part of a
    word (C#, F#m) marks no final answer; an answer with such a `#` is compared in full.
    """
    marked = _MARKED.search(answer)
    if marked is None and "#" in answer:
        return float(response.strip() == answer.strip())
    return float(final_answer(response) == (answer if marked is None else marked[1]).strip())


class MathChecker:
    """Compares mathematical expressions through the library math-verify, in a process of its own.

    The library bounds its time by SIGALRM, which only a main thread may set, and sympy can be stuck where no Python
    signal reaches it. The worker process gives the library its main thread; a worker that does not answer within twice
    `timeout_s` is killed, the response counts as wrong, and the next call starts another. The worker ends by itself
    when its input closes. `timeouts` counts the comparisons that were given up.
    """

    def __init__(self, timeout_s: float = 5.0) -> None:
        self.timeouts = 0
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[str] | None = None

    def __call__(self, response: str, answer: str) -> float:
        """1.0 where the response's last expression equals the answer. Raises EnvironmentMissing where the worker cannot start."""
        with self._lock:
            worker = self._started()
            reply = self._ask(worker, {"response": response, "answer": answer, "timeout_s": self._timeout_s}, 2 * self._timeout_s)
            if reply is None or reply["timed_out"]:
                self.timeouts += 1
                return 0.0
            return float(reply["equal"])

    def close(self) -> None:
        """End the worker. Calling again, and after that using the checker again, are both fine."""
        with self._lock:
            self._stop()

    def __enter__(self) -> MathChecker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _started(self) -> subprocess.Popen[str]:
        if self._worker is None or self._worker.poll() is not None:
            self._stop()
            # A session of its own: Ctrl-C is the trainer's to handle. By file, since a worker need not find the package.
            self._worker = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("math_worker.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
                start_new_session=True,
            )
            if self._ask(self._worker, None, _START_S) is None:
                raise EnvironmentMissing("data.checker: the math-verify worker did not start; install math-verify, and see its output")
        return self._worker

    def _ask(self, worker: subprocess.Popen[str], message: dict[str, object] | None, deadline_s: float) -> dict[str, bool] | None:
        """Send a message to the worker, unless it is None, and return its reply. Where it does not answer, end it and return None."""
        assert worker.stdin is not None and worker.stdout is not None
        try:
            if message is not None:
                worker.stdin.write(json.dumps(message) + "\n")
            with DefaultSelector() as selector:
                selector.register(worker.stdout, EVENT_READ)
                line = worker.stdout.readline() if selector.select(deadline_s) else ""
        except BrokenPipeError:
            line = ""
        if not line:
            self._stop()
            return None
        return json.loads(line)

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker.communicate()
            self._worker = None


def make_checker(kind: Literal["exact", "math"]) -> Checker:
    """The checker that the recipe's `data.checker` names."""
    return exact_checker if kind == "exact" else MathChecker()


def overlong_penalty(length: int, max_tokens: int, config: OverlongConfig) -> float:
    """The value from -penalty to 0 that is added to the reward of a response of `length` tokens.

    DAPO's soft overlong punishment (arXiv 2503.14476, equation 13): 0 up to max_tokens - buffer, and from there linear to -penalty at
    max_tokens.
    """
    if not config.enabled:
        return 0.0
    over = length - (max_tokens - config.buffer)
    return -config.penalty * min(max(over / config.buffer, 0.0), 1.0)
