"""The code of an isolated run: a program, the cells of a session, an answer, or the tests of an answer.

Except for tests, this code shares its process with the model's code, which may tamper with it. Therefore its results are not trusted: the
output of an answer is compared outside, and tests run in a separate process (`questions`).
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

from mtpctl.sandbox.judging import compiled, one_line, run_calls, run_tests
from mtpctl.sandbox.messages import VerdictWriter, read_frame, write_frame
from mtpctl.sandbox.questions import AnswerPeer, TestsPeer

JOB, CHANNEL, LINK = 3, 4, 5
NOT_CONFINED = 96
"""Exit code of a process that could not be isolated and therefore ran nothing."""
_FILE = "answer.py"
_RECURSION_LIMIT = 50_000
"""Recursion limit of LiveCodeBench."""
_PRELUDE = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools", "functools"),
    *("operator", "io", "sys", "json", "typing"),
)


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
    """Run the job, and end the process."""
    with open(JOB, "rb") as file:
        job: Job = json.loads(file.read())
    kinds: dict[str, Callable[[Job], int]] = {"program": _program, "session": _session, "answer": _answer, "tests": _tests, "calls": _calls}
    code = 1
    try:
        code = kinds[job["kind"]](job)
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
    """Run the code as a program. Returns its exit code."""
    module = _main_module()
    try:
        exec(compiled(job["code"], _FILE), vars(module))
        code = 0
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException as error:
        _print_error(error)
        code = 1
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # wait for its threads, as a program does
    with suppress(BaseException):
        atexit._run_exitfuncs()
    return code


def _session(job: Job) -> int:
    """Run cells from the channel in one namespace. The last expression of a cell is printed, as in interactive Python."""
    module = _main_module()
    number = 0
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt must only affect cells
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
    exec(compile(tree, file, "exec"), vars(module))
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), file, "eval"), vars(module))
        if value is not None:
            print(repr(value))


def _answer(job: Job) -> int:
    """Execute the answer's code, then serve the requests of the tests."""
    module = _main_module("answer")
    end = AnswerPeer(LINK)
    if function := job.get("function"):
        vars(module).update(_prelude(function))
        sys.setrecursionlimit(_RECURSION_LIMIT)
    try:
        exec(compiled(job["code"], _FILE), vars(module))
        error = ""
    except BaseException as raised:
        _print_error(raised)
        error = one_line(raised)
    end.answer(vars(module), error)
    return 0


def _tests(job: Job) -> int:
    """Run the tests, and write verdicts to the channel."""
    run_tests(job["tests"], job["names"], job["builtins"], TestsPeer(LINK), VerdictWriter(CHANNEL, job["key"]))
    return 0


def _calls(job: Job) -> int:
    """Compare the results of calls with the expected ones, and write verdicts to the channel."""
    run_calls(job["function"], job["cases"], TestsPeer(LINK), VerdictWriter(CHANNEL, job["key"]))
    return 0


def _main_module(name: str = "__main__") -> types.ModuleType:
    module = types.ModuleType(name)
    sys.modules[name] = module
    return module


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _print_error(error: BaseException) -> None:
    """Print the traceback without the frames of this module."""
    with suppress(BaseException):
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)


def _prelude(function: str) -> dict[str, object]:
    """Names that answers to functional cases may use without an import, as in LiveCodeBench, except the name of the answer's function."""
    modules = {name: importlib.import_module(name) for name in _PRELUDE}
    space: dict[str, object] = {}
    for module in modules.values():
        names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
        space |= {name: getattr(module, name) for name in names if not hasattr(builtins, name)}
    space |= modules
    return {name: each for name, each in space.items() if name not in (function, "Solution")}
