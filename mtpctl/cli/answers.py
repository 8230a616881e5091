"""Print the answer of a command to stdout, and keep stdout free of everything else under `--json`."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO

_answers: TextIO | None = None
"""The stream for answers while `stdout_is_for_answers` is active."""


def answer(text: str = "", *, end: str = "\n") -> None:
    print(text, file=_answers or sys.stdout, end=end, flush=True)


@contextlib.contextmanager
def stdout_is_for_answers() -> Iterator[None]:
    """Redirect what libraries, native code and child processes write to stdout to stderr; `answer` still writes to stdout."""
    global _answers
    stdout = sys.stdout
    _flush(stdout)
    before = os.dup(1)
    try:
        # Under pytest's capture stdout has no descriptor, or another one.
        real = stdout.fileno() == 1
    except io.UnsupportedOperation:
        real = False
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, before)
        _answers = undo.enter_context(open(os.dup(before), "w", encoding=stdout.encoding)) if real else stdout
        os.dup2(2, 1)
        undo.callback(os.dup2, before, 1)
        undo.callback(_flush, stdout)  # what is still buffered is no answer either
        undo.enter_context(contextlib.redirect_stdout(sys.stderr))
        try:
            yield
        finally:
            _answers = None


def _flush(stdout: TextIO) -> None:
    """Flush the buffers of Python and of native code."""
    import ctypes

    stdout.flush()
    ctypes.CDLL(None).fflush(None)
