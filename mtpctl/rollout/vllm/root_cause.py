"""Why vLLM's engine core failed to start, read from what its process wrote to stderr.

The core runs in a process of its own. Where it dies before it serves, `AsyncLLM` says no more than that it did, and the traceback is on
the stderr that the core inherited. In a Ray actor that is a file in Ray's session folder, which is removed with the session.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STDERR = Path("/proc/self/fd/2")
TAIL_BYTES = 256 << 10
"""Bytes from the end of stderr that are searched."""

FAILED = "Engine core initialization failed"
_REFERS_ELSEWHERE = (FAILED, "WorkerProc initialization failed")
"""Errors by which one of vLLM's processes says that another one has failed."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LOG_PREFIX = re.compile(r"^(?P<process>\([^()]* pid=\d+\) )?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] )?")
_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(: .*)?$")


@contextmanager
def named_in_failures(stderr: Path = STDERR) -> Iterator[None]:
    """Have the error of an engine core that fails to start inside the block name the exception that its process died of.

    Where `stderr` is no file (a terminal, a pipe), or has no traceback, the error is raised as vLLM made it.
    """
    began = _size(stderr)
    try:
        yield
    except RuntimeError as error:
        if FAILED not in str(error) or began is None or (cause := root_cause(_tail(stderr, began))) is None:
            raise
        raise RuntimeError(f"{error}; root cause: {cause}") from error


def root_cause(text: str) -> str | None:
    """The exception in `text`, as `Name: message`, that the failure goes back to; None where `text` has no traceback.

    That is the last one before an error that refers to another process. Only the first line of a message counts.
    """
    # Processes write at the same time; vLLM's log lines say which one a line is from.
    open_tracebacks: set[str] = set()
    last = None
    for raw in text.splitlines():
        line = _COLOUR.sub("", raw)
        prefix = _LOG_PREFIX.match(line)
        assert prefix is not None, "the pattern matches an empty prefix too"
        process, line = prefix["process"] or "", line[prefix.end() :]
        if line == _TRACEBACK:
            open_tracebacks.add(process)
        elif process in open_tracebacks and _EXCEPTION.match(line):
            open_tracebacks.remove(process)
            if not any(message in line for message in _REFERS_ELSEWHERE):
                last = line
            elif last is not None:
                break
    return last


def _size(path: Path) -> int | None:
    """Bytes of a file; None for anything else."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _tail(path: Path, began: int) -> str:
    """What was written since the file had `began` bytes, or the end of it."""
    try:
        with path.open("rb") as file:
            file.seek(max(began, file.seek(0, 2) - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
