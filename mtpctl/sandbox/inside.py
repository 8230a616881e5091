"""What a run does behind the walls: a program, the cells of a session, an answer that is asked, or the tests that ask it.

Apart from the tests, everything here shares its process with code of the model, which may tamper with it. So none of its results is
trusted: what an answer printed is compared outside, and tests run in a process of their own (`questions`).
"""

from __future__ import annotations

import ast
import atexit
import builtins
import importlib
import json
import linecache
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from typing import TypedDict

from mtpctl.sandbox.frames import read_frame, write_frame
from mtpctl.sandbox.questions import Peer, PeerGone

JOB, CHANNEL, LINK = 3, 4, 5
NOT_CONFINED = 96
"""Exit code of a process that could not be put behind its walls, and has run nothing."""
_FILE = "answer.py"


class Job(TypedDict, total=False):
    """What is to be done: `kind` is program, session, answer or tests."""

    kind: str
    code: str
    tests: list[str]
    names: list[str]
    builtins: list[str]


def play() -> None:
    """Do the job, and end the process."""
    with open(JOB, "rb") as file:
        job: Job = json.loads(file.read())
    work: dict[str, Callable[[Job], int]] = {"program": _program, "session": _session, "answer": _answer, "tests": _tests}
    code = 1
    try:
        code = work[job["kind"]](job)
    except BaseException:
        with suppress(BaseException):
            traceback.print_exc()
    _end(code)


def _end(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(BaseException):
            stream.flush()
    os._exit(code)


def _program(job: Job) -> int:
    """The code as a program of its own: its exit code."""
    module = _main_module()
    try:
        _execute(_compiled(job["code"], _FILE), module)
        code = 0
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException as error:
        _print_error(error)
        code = 1
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # a program waits for its threads, and so does this one
    with suppress(BaseException):
        atexit._run_exitfuncs()
    return code


def _session(job: Job) -> int:
    """Cells that come on the channel, one namespace for all of them. The last expression of a cell is printed, as at Python's prompt."""
    module = _main_module()
    number = 0
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the cell alone
    while (cell := read_frame(CHANNEL)) is not None:
        number += 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _cell(json.loads(cell)["code"], f"cell {number}", module)
        except SystemExit as error:
            _end(_exit_code(error))
        except BaseException as error:
            _print_error(error)
        with suppress(BaseException):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        for stream in (sys.stdout, sys.stderr):
            with suppress(BaseException):
                stream.flush()
        write_frame(CHANNEL, b"{}")
    return 0


def _cell(code: str, file: str, module: types.ModuleType) -> None:
    tree = ast.parse(code, file)
    linecache.cache[file] = (len(code), None, code.splitlines(True), file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    _execute(compile(tree, file, "exec"), module)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), file, "eval"), vars(module))
        if value is not None:
            print(repr(value))


def _answer(job: Job) -> int:
    """Execute the code, and then do what the tests ask for."""
    module = _main_module("answer")
    peer = Peer(LINK, trusted=False)
    try:
        _execute(_compiled(job["code"], _FILE), module)
        error = ""
    except BaseException as raised:
        _print_error(raised)
        error = _in_a_line(raised)
    peer.answer(vars(module), error)
    return 0


def _tests(job: Job) -> int:
    """Run the tests one by one, and tell of each on the channel whether it passed."""
    peer = Peer(LINK, trusted=True)
    space: dict[str, object] = {"__name__": "tests", "__builtins__": builtins}
    try:
        error = peer.begin()
        names = [name for name in job["names"] if not _own(name, space, job["builtins"])]
        space |= peer.fetch(names)
    except PeerGone:
        error = "the answer's process ended before the tests began"
    for place, test in enumerate(job["tests"]):
        file = f"test {place}"
        told = error
        if not told:
            try:
                exec(_compiled(test, file), space)
            except BaseException as raised:
                told = _in_a_line(raised)
                if isinstance(raised, PeerGone):
                    error = told
        write_frame(CHANNEL, json.dumps({"passed": not told, "error": told[:500]}).encode())
    return 0


def _own(name: str, space: dict[str, object], wanted: list[str]) -> bool:
    """Whether a name in the tests means Python's own thing, whatever the answer calls so; modules are imported here."""
    if name in wanted:
        return False
    if name in sys.stdlib_module_names or name in ("np", "numpy"):
        with suppress(ImportError):
            space[name] = importlib.import_module("numpy" if name == "np" else name)
            return True
    return hasattr(builtins, name)


def _main_module(name: str = "__main__") -> types.ModuleType:
    module = types.ModuleType(name)
    sys.modules[name] = module
    return module


def _compiled(code: str, file: str) -> types.CodeType:
    linecache.cache[file] = (len(code), None, code.splitlines(True), file)
    return compile(code, file, "exec", dont_inherit=True)


def _execute(code: types.CodeType, module: types.ModuleType) -> None:
    exec(code, vars(module))


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _print_error(error: BaseException) -> None:
    """The traceback, without the frames of this module."""
    with suppress(BaseException):
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)


def _in_a_line(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}".strip().splitlines()[0].rstrip(": ")
    except BaseException:
        return type(error).__name__
