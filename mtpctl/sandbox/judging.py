"""Runs tests, or calls with expected results, against an answer that runs in another process.

A guard prevents tests from running text of the answer, for example by `eval(f(x))` or `pickle.loads(f(x))`. It is an audit hook, which
Python code cannot remove. It checks every code object before it runs, and every class that a pickle names. Everything is allowed until the
process has received data from the answer. After that, code may run in these cases:

- it belongs to the tests, or is a string constant that they pass to `eval`, `exec` or `compile`;
- it contains no names, such as `[1, 2 + 3]`, so it cannot access any object;
- a module is imported, or `collections` or `dataclasses` build a class: they check the names that they receive.
"""

from __future__ import annotations

import ast
import builtins
import collections
import dataclasses
import importlib
import linecache
import sys
from collections.abc import Callable
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any, cast

from mtpctl.sandbox.messages import VerdictWriter
from mtpctl.sandbox.questions import PeerGone, TestsPeer
from mtpctl.sandbox.values import Remote, decode, no_references

TEST_FILE = "test "
"""Prefix of the file names of tests."""
_IMPORT = "<frozen importlib._bootstrap>"
_BUILDERS = frozenset((collections.__file__, dataclasses.__file__))
_PICKLED = {
    "builtins": {"set", "frozenset", "bytearray", "complex", "range", "slice", "int", "float", "str", "list", "dict", "tuple"},
    "collections": {"OrderedDict", "deque", "Counter", "defaultdict"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "fractions": {"Fraction"},
    "_codecs": {"encode"},
}
"""Classes of plain data that a pickle of the answer may name."""
_RUNNERS = ("eval", "exec", "compile")
_NEW_FUNCTIONS = frozenset(("function.__new__", "code.__new__"))


class Refused(BaseException):
    """The tests would have run text from the answer. Not an Exception, so that no test catches it."""


class Guard:
    """Watches the tests of this process. `refused`: the error of the current test, if it tried to run text of the answer."""

    def __init__(self, tests: list[str], received: Callable[[], bool]) -> None:
        self.refused = ""
        self._tests, self._received = tests, received
        self._own: set[CodeType] = set()
        self._constants: frozenset[CodeType] | None = None
        sys.addaudithook(self._check)

    def compiled(self, code: CodeType) -> CodeType:
        """Register code of the tests, which may run."""
        self._own.add(code)
        return code

    def _check(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "exec":
            code = arguments[0]
            allowed = isinstance(code, CodeType) and (not self._received() or self._allows(code, sys._getframe(1)))
        elif event == "pickle.find_class":
            module, name = arguments
            allowed = not self._received() or name in _PICKLED.get(str(module), ())
        elif event in _NEW_FUNCTIONS:
            allowed = not self._received() or sys._getframe(1).f_code.co_filename in _BUILDERS
        else:
            return
        if not allowed:
            self.refused = f"the test runs text that may be the answer's ({event})"
            raise Refused(self.refused)

    def _allows(self, code: CodeType, caller: FrameType) -> bool:
        names_nothing = not code.co_names and not any(isinstance(each, CodeType) for each in code.co_consts)
        if code in self._own or names_nothing or caller.f_code.co_filename in _BUILDERS or _imports(caller):
            return True
        if self._constants is None:
            self._constants = frozenset(each for test in self._tests for each in _compiled_constants(test))
        return code in self._constants


def _imports(frame: FrameType | None) -> bool:
    """Whether a module is being imported, up to the frame of the test."""
    while frame is not None and not frame.f_code.co_filename.startswith(TEST_FILE):
        if frame.f_code.co_filename == _IMPORT:
            return True
        frame = frame.f_back
    return False


def _compiled_constants(test: str) -> set[CodeType]:
    """The string constants that a test itself passes to `eval`, `exec` or `compile`."""
    codes = set()
    for node in ast.walk(ast.parse(test)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _RUNNERS and node.args):
            continue
        if isinstance(text := node.args[0], ast.Constant) and isinstance(text.value, str):
            for mode in ("eval", "exec"):
                with suppress(SyntaxError, ValueError):
                    codes.add(compile(text.value.lstrip(" \t") if mode == "eval" else text.value, "<string>", mode, dont_inherit=True))
    return codes


Space = dict[str, object]


def run_tests(tests: list[str], names: list[str], entry_points: list[str], end: TestsPeer, verdicts: VerdictWriter) -> None:
    """Run the tests in one namespace, and report each. `names`: the free names of the tests; `entry_points` always refer to the answer."""
    guard = Guard(tests, lambda: end.received)
    space: Space = {"__name__": "__main__", "__builtins__": builtins}
    error = _begin(end, lambda: space.update(end.fetch([name for name in names if not _is_own(name, space, entry_points)])))
    for number, test in enumerate(tests):
        file = f"{TEST_FILE}{number}"

        def run(test: str = test, file: str = file) -> None:
            exec(guard.compiled(compiled(test, file)), space)

        verdicts.write(error or _outcome(run, end, guard))


def run_calls(function: str, cases: list[object], end: TestsPeer, verdicts: VerdictWriter) -> None:
    """Call the answer's function with the arguments of each case, and report whether the result is accepted.

    A case is a list of the arguments and the accepted results, encoded by `values.encode`.
    """
    space: Space = {}
    error = _begin(end, lambda: space.update(end.fetch(["Solution", function])))
    error = error or _outcome(lambda: space.update(function=_callable(space, function)), end)
    for case in cases:
        arguments, results = decode(case, no_references)

        def run(arguments: list[Any] = arguments, results: list[Any] = results) -> None:
            result = _as_json(cast("Callable[..., object]", space["function"])(*arguments))
            if not any(result == each for each in results):
                raise AssertionError("another result")

        outcome = error or _outcome(run, end)
        if end.gone:  # probably out of time: the caller handles this case and the rest
            return
        verdicts.write(outcome)


def _callable(space: Space, function: str) -> object:
    """The method `function` of an instance of the answer's class `Solution`, or else the answer's function of this name."""
    solution = space.get("Solution")
    if isinstance(solution, Remote) and hasattr(solution, function):
        return getattr(cast("Callable[[], object]", solution)(), function)
    if function not in space:
        raise NameError(f"the answer does not define {function}")
    return space[function]


def _as_json(value: object) -> object:
    """The value with lists for tuples, since JSON has no tuples."""
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    return {key: _as_json(each) for key, each in value.items()} if isinstance(value, dict) else value


def _begin(end: TestsPeer, fetch: Callable[[], object]) -> str:
    """Wait for the answer's code and fetch its objects. Returns the reason if no test can run, else an empty string."""
    try:
        if error := end.begin():
            return error
        fetch()
    except PeerGone:
        return "the answer's process ended before the tests began"
    return ""


def _outcome(run: Callable[[], None], end: TestsPeer, guard: Guard | None = None) -> str:
    """Run a test and return why it failed, or an empty string. A test fails if the answer's process is gone or the guard refused text."""
    error = end.gone
    if not error:
        try:
            run()
        except BaseException as raised:
            with end.silence():
                error = one_line(raised)
    refused, gone = guard.refused if guard else "", end.gone
    if guard:
        guard.refused = ""
    return refused or gone or error


def _is_own(name: str, space: Space, entry_points: list[str]) -> bool:
    """Whether a name in the tests refers to Python rather than to the answer. Imports modules of that name."""
    if name in entry_points:
        return False
    if name in sys.stdlib_module_names or name in ("np", "numpy"):
        with suppress(ImportError):
            space[name] = importlib.import_module("numpy" if name == "np" else name)
            return True
    return hasattr(builtins, name) or (name[:2] == "__" == name[-2:])


def compiled(code: str, file: str) -> CodeType:
    """Compile code, and register its lines for tracebacks."""
    linecache.cache[file] = (len(code), None, code.splitlines(True), file)
    return compile(code, file, "exec", dont_inherit=True)


def one_line(error: BaseException) -> str:
    """Class and message of an exception in one line, even if its `__str__` fails; never empty."""
    try:
        return f"{type(error).__name__}: {error}".strip().splitlines()[0].rstrip(": ") or "failed"
    except BaseException:
        return type(error).__name__ or "failed"
