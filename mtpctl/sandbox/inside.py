"""What a run does behind the walls: a program, the cells of a session, an answer that is asked, or the tests that ask it.

Apart from the tests, everything here shares its process with code of the model, which may tamper with it. So none of its results is
trusted: what an answer printed is compared outside, and tests run in a process of their own (`questions`).
"""

from __future__ import annotations

import ast
import atexit
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
from mtpctl.sandbox.judging import compiled, in_a_line, run_calls, run_tests
from mtpctl.sandbox.prelude import prelude
from mtpctl.sandbox.questions import AnswerEnd, TestsEnd
from mtpctl.sandbox.verdicts import VerdictWriter

JOB, CHANNEL, LINK = 3, 4, 5
NOT_CONFINED = 96
"""Exit code of a process that could not be put behind its walls, and has run nothing."""
_FILE = "answer.py"
_DEEPEST_CALLS = 50_000
"""Recursion limit of LiveCodeBench."""


class Job(TypedDict, total=False):
    """A job: `kind` is program, session, answer, tests or calls."""

    kind: str
    code: str
    tests: list[str]
    names: list[str]
    builtins: list[str]
    function: str
    cases: list[object]
    key: str


def play() -> None:
    """Do the job, and end the process."""
    with open(JOB, "rb") as file:
        job: Job = json.loads(file.read())
    work: dict[str, Callable[[Job], int]] = {
        "program": _program,
        "session": _session,
        "answer": _answer,
        "tests": _tests,
        "calls": _calls,
    }
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
        _execute(compiled(job["code"], _FILE), module)
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
    end = AnswerEnd(LINK)
    if function := job.get("function"):
        vars(module).update(prelude(function))
        sys.setrecursionlimit(_DEEPEST_CALLS)
    try:
        _execute(compiled(job["code"], _FILE), module)
        error = ""
    except BaseException as raised:
        _print_error(raised)
        error = in_a_line(raised)
    end.answer(vars(module), error)
    return 0


def _tests(job: Job) -> int:
    """Run the tests, and report each on the channel."""
    run_tests(job["tests"], job["names"], job["builtins"], TestsEnd(LINK), VerdictWriter(CHANNEL, job["key"]))
    return 0


def _calls(job: Job) -> int:
    """Compare the results of calls with the expected ones, and report each on the channel."""
    run_calls(job["function"], job["cases"], TestsEnd(LINK), VerdictWriter(CHANNEL, job["key"]))
    return 0


def _main_module(name: str = "__main__") -> types.ModuleType:
    module = types.ModuleType(name)
    sys.modules[name] = module
    return module


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
