"""The code of a sandboxed process: a program, the cells of a session, an answer, or the tests of an answer.

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

from mtpctl.sandbox.judging import compile_with_source, describe_error, run_calls, run_tests
from mtpctl.sandbox.messages import VerdictWriter, read_frame, write_frame
from mtpctl.sandbox.questions import AnswerPeer, TestsPeer

JOB_FD, CHANNEL_FD, LINK_FD = 3, 4, 5
EXIT_NOT_ISOLATED = 96
"""Exit code of a process that could not be isolated and therefore ran nothing."""
_ANSWER_FILE = "answer.py"
_RECURSION_LIMIT = 50_000
"""Recursion limit that LiveCodeBench sets."""
_PRELUDE_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools", "functools"),
    *("operator", "io", "sys", "json", "typing"),
)


class Job(TypedDict, total=False):
    """The input of a process. `kind` is program, session, answer, tests or calls; it determines the other keys."""

    kind: str
    code: str
    tests: list[str]
    names: list[str]
    builtins: list[str]
    function: str
    cases: list[object]
    key: str


def run_job() -> None:
    """Run the job, and end the process."""
    with open(JOB_FD, "rb") as file:
        job: Job = json.loads(file.read())
    handlers: dict[str, Callable[[Job], int]] = {
        "program": _run_program,
        "session": _run_session,
        "answer": _serve_answer,
        "tests": _run_tests,
        "calls": _run_calls,
    }
    exit_code = 1
    try:
        exit_code = handlers[job["kind"]](job)
    except BaseException:
        with suppress(BaseException):
            traceback.print_exc()
    _exit_process(exit_code)


def _exit_process(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(BaseException):
            stream.flush()
    os._exit(code)


def _run_program(job: Job) -> int:
    """Run the code as a program. Returns its exit code."""
    module = _main_module()
    try:
        exec(compile_with_source(job["code"], _ANSWER_FILE), vars(module))
        code = 0
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException as error:
        _print_error(error)
        code = 1
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # wait for threads, as at the end of a program
    with suppress(BaseException):
        atexit._run_exitfuncs()
    return code


def _run_session(job: Job) -> int:
    """Run cells from the channel in one namespace. The last expression of a cell is printed, as in interactive Python."""
    module = _main_module()
    number = 0
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt must only affect cells
    while (cell := read_frame(CHANNEL_FD)) is not None:
        number += 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _run_cell(json.loads(cell)["code"], f"cell {number}", module)
        except SystemExit as error:
            _exit_process(_exit_code(error))
        except BaseException as error:
            _print_error(error)
        with suppress(BaseException):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        for stream in (sys.stdout, sys.stderr):
            with suppress(BaseException):
                stream.flush()
        write_frame(CHANNEL_FD, b"{}")
    return 0


def _run_cell(code: str, file: str, module: types.ModuleType) -> None:
    tree = ast.parse(code, file)
    linecache.cache[file] = (len(code), None, code.splitlines(True), file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, file, "exec"), vars(module))
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), file, "eval"), vars(module))
        if value is not None:
            print(repr(value))


def _serve_answer(job: Job) -> int:
    """Execute the answer's code, then serve the requests of the tests."""
    module = _main_module("answer")
    peer = AnswerPeer(LINK_FD)
    if function := job.get("function"):
        vars(module).update(_prelude_names(function))
        sys.setrecursionlimit(_RECURSION_LIMIT)
    try:
        exec(compile_with_source(job["code"], _ANSWER_FILE), vars(module))
        error = ""
    except BaseException as exception:
        _print_error(exception)
        error = describe_error(exception)
    peer.answer(vars(module), error)
    return 0


def _run_tests(job: Job) -> int:
    """Run the tests, and write verdicts to the channel."""
    run_tests(job["tests"], job["names"], job["builtins"], TestsPeer(LINK_FD), VerdictWriter(CHANNEL_FD, job["key"]))
    return 0


def _run_calls(job: Job) -> int:
    """Compare the results of calls with the expected ones, and write verdicts to the channel."""
    run_calls(job["function"], job["cases"], TestsPeer(LINK_FD), VerdictWriter(CHANNEL_FD, job["key"]))
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


def _prelude_names(function: str) -> dict[str, object]:
    """The names that answers to functional cases can use in LiveCodeBench, except `function` and `Solution`, which they define."""
    modules = {name: importlib.import_module(name) for name in _PRELUDE_MODULES}
    namespace: dict[str, object] = {}
    for module in modules.values():
        names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
        namespace |= {name: getattr(module, name) for name in names if not hasattr(builtins, name)}
    namespace |= modules
    return {name: value for name, value in namespace.items() if name not in (function, "Solution")}
