"""What a command was asked for goes to stdout; under `--json` nothing else does, whoever writes it."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO

_kept: TextIO | None = None
"""Where answers go while stdout is theirs alone."""


def answer(text: str = "", *, end: str = "\n") -> None:
    """Print what the command was asked for."""
    print(text, file=_kept or sys.stdout, end=end, flush=True)


@contextlib.contextmanager
def stdout_is_for_answers() -> Iterator[None]:
    """Until it ends, what libraries, native code and child processes write to stdout goes to stderr; `answer` still reaches stdout."""
    global _kept
    stdout = sys.stdout
    _empty(stdout)
    before = os.dup(1)
    try:
        # Under a test's capture it is no file, or another one.
        real = stdout.fileno() == 1
    except io.UnsupportedOperation:
        real = False
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, before)
        _kept = undo.enter_context(open(os.dup(before), "w", encoding=stdout.encoding)) if real else stdout
        os.dup2(2, 1)
        undo.callback(os.dup2, before, 1)
        undo.callback(_empty, stdout)  # what was held back is no answer either
        undo.enter_context(contextlib.redirect_stdout(sys.stderr))
        try:
            yield
        finally:
            _kept = None


def _empty(stdout: TextIO) -> None:
    """Write out what Python and native code hold back for stdout."""
    stdout.flush()
    ctypes.CDLL(None).fflush(None)
