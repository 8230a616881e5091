"""Runs tests, or calls with expected results, against an answer that runs in another process.

A guard prevents tests from running text of the answer, for example by `eval(f(x))` or `pickle.loads(f(x))`. It is an audit hook, which
Python code cannot remove. The hook checks every code object before it runs, and every class that a pickle names. Everything is allowed
until the process has received data from the answer. After that, code may run in these cases:

- the code belongs to the tests, or is a string constant that they pass to `eval`, `exec` or `compile`;
- the code contains no names, such as `[1, 2 + 3]`, so it cannot access any object;
- a module is imported, or `collections` or `dataclasses` build a class: these modules check the names that they receive.
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
from mtpctl.sandbox.values import Remote, decode, reject_references

TEST_FILE = "test "
"""Prefix of the file names of tests."""
_IMPORT_FILE = "<frozen importlib._bootstrap>"
_CLASS_BUILDER_FILES = frozenset((collections.__file__, dataclasses.__file__))
_PICKLE_CLASSES = {
    "builtins": {"set", "frozenset", "bytearray", "complex", "range", "slice", "int", "float", "str", "list", "dict", "tuple"},
    "collections": {"OrderedDict", "deque", "Counter", "defaultdict"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "fractions": {"Fraction"},
    "_codecs": {"encode"},
}
"""Classes of plain data that a pickle of the answer may name."""
_CODE_RUNNERS = ("eval", "exec", "compile")
_CODE_CREATION_EVENTS = frozenset(("function.__new__", "code.__new__"))


class TextExecutionRefused(BaseException):
    """The tests would have run text from the answer. Not an Exception, so that no test catches it."""


class Guard:
    """Prevents the tests of this process from running text of the answer. `refused`: the error of the current test, if it tried to."""

    def __init__(self, tests: list[str], received: Callable[[], bool]) -> None:
        self.refused = ""
        self._tests, self._received = tests, received
        self._test_code: set[CodeType] = set()
        self._constants: frozenset[CodeType] | None = None
        sys.addaudithook(self._check)

    def allow(self, code: CodeType) -> CodeType:
        """Register code of the tests, which may run."""
        self._test_code.add(code)
        return code

    def _check(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "exec":
            code = arguments[0]
            allowed = isinstance(code, CodeType) and (not self._received() or self._allows(code, sys._getframe(1)))
        elif event == "pickle.find_class":
            module, name = arguments
            allowed = not self._received() or name in _PICKLE_CLASSES.get(str(module), ())
        elif event in _CODE_CREATION_EVENTS:
            allowed = not self._received() or sys._getframe(1).f_code.co_filename in _CLASS_BUILDER_FILES
        else:
            return
        if not allowed:
            self.refused = f"the test runs text that may be the answer's ({event})"
            raise TextExecutionRefused(self.refused)

    def _allows(self, code: CodeType, caller: FrameType) -> bool:
        names_nothing = not code.co_names and not any(isinstance(constant, CodeType) for constant in code.co_consts)
        if code in self._test_code or names_nothing or caller.f_code.co_filename in _CLASS_BUILDER_FILES or _is_importing(caller):
            return True
        if self._constants is None:
            self._constants = frozenset(constant for test in self._tests for constant in _compiled_constants(test))
        return code in self._constants


def _is_importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported, according to the frames up to that of the test."""
    while frame is not None and not frame.f_code.co_filename.startswith(TEST_FILE):
        if frame.f_code.co_filename == _IMPORT_FILE:
            return True
        frame = frame.f_back
    return False


def _compiled_constants(test: str) -> set[CodeType]:
    """The compiled code of the string constants that a test itself passes to `eval`, `exec` or `compile`."""
    code_objects = set()
    for node in ast.walk(ast.parse(test)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CODE_RUNNERS and node.args):
            continue
        if isinstance(argument := node.args[0], ast.Constant) and isinstance(argument.value, str):
            for mode in ("eval", "exec"):
                with suppress(SyntaxError, ValueError):
                    code_objects.add(
                        compile(argument.value.lstrip(" \t") if mode == "eval" else argument.value, "<string>", mode, dont_inherit=True)
                    )
    return code_objects


Namespace = dict[str, object]


def run_tests(tests: list[str], names: list[str], entry_points: list[str], peer: TestsPeer, verdicts: VerdictWriter) -> None:
    """Run the tests in one namespace, and report each. `names`: the free names of the tests; `entry_points` always refer to the answer."""
    guard = Guard(tests, lambda: peer.received)
    namespace: Namespace = {"__name__": "__main__", "__builtins__": builtins}
    error = _start_tests(
        peer, lambda: namespace.update(peer.fetch([name for name in names if not _refers_to_python(name, namespace, entry_points)]))
    )
    for number, test in enumerate(tests):
        file = f"{TEST_FILE}{number}"

        def run(test: str = test, file: str = file) -> None:
            exec(guard.allow(compile_with_source(test, file)), namespace)

        verdicts.write(error or _run_test(run, peer, guard))


def run_calls(function: str, cases: list[object], peer: TestsPeer, verdicts: VerdictWriter) -> None:
    """Call the answer's function with the arguments of each case, and report whether the result is accepted.

    A case is a pair: the list of arguments and the list of accepted results, encoded by `values.encode`.
    """
    namespace: Namespace = {}
    error = _start_tests(peer, lambda: namespace.update(peer.fetch(["Solution", function])))
    error = error or _run_test(lambda: namespace.update(function=_find_callable(namespace, function)), peer)
    for case in cases:
        arguments, results = decode(case, reject_references)

        def run(arguments: list[Any] = arguments, results: list[Any] = results) -> None:
            result = _as_json(cast("Callable[..., object]", namespace["function"])(*arguments))
            if not any(result == accepted for accepted in results):
                raise AssertionError("the result is not accepted")

        outcome = error or _run_test(run, peer)
        if peer.gone:  # probably a timeout: the caller handles this case and the following ones
            return
        verdicts.write(outcome)


def _find_callable(namespace: Namespace, function: str) -> object:
    """The method `function` of an instance of the answer's class `Solution`, or else the answer's function of this name."""
    solution = namespace.get("Solution")
    if isinstance(solution, Remote) and hasattr(solution, function):
        return getattr(cast("Callable[[], object]", solution)(), function)
    if function not in namespace:
        raise NameError(f"the answer does not define {function}")
    return namespace[function]


def _as_json(value: object) -> object:
    """Replace tuples by lists, because JSON has no tuples."""
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return {key: _as_json(item) for key, item in value.items()} if isinstance(value, dict) else value


def _start_tests(peer: TestsPeer, fetch: Callable[[], object]) -> str:
    """Wait until the answer's code has run, and fetch its objects. Returns the reason if no test can run, else an empty string."""
    try:
        if error := peer.begin():
            return error
        fetch()
    except PeerGone:
        return "the answer's process ended before the tests began"
    return ""


def _run_test(run: Callable[[], None], peer: TestsPeer, guard: Guard | None = None) -> str:
    """Run a test and return why it failed, or an empty string. A test fails if the answer's process is gone or the guard refused text."""
    error = peer.gone
    if not error:
        try:
            run()
        except BaseException as exception:
            with peer.silence():
                error = describe_error(exception)
    refused, gone = guard.refused if guard else "", peer.gone
    if guard:
        guard.refused = ""
    return refused or gone or error


def _refers_to_python(name: str, namespace: Namespace, entry_points: list[str]) -> bool:
    """Whether a name in the tests is a builtin or a known module, not an object of the answer. Imports the module into `namespace`."""
    if name in entry_points:
        return False
    if name in sys.stdlib_module_names or name in ("np", "numpy"):
        with suppress(ImportError):
            namespace[name] = importlib.import_module("numpy" if name == "np" else name)
            return True
    return hasattr(builtins, name) or (name[:2] == "__" == name[-2:])


def compile_with_source(code: str, file: str) -> CodeType:
    """Compile code, and register its lines for tracebacks."""
    linecache.cache[file] = (len(code), None, code.splitlines(True), file)
    return compile(code, file, "exec", dont_inherit=True)


def describe_error(error: BaseException) -> str:
    """Class and message of an exception in one line, even if its `__str__` fails; never empty."""
    try:
        return f"{type(error).__name__}: {error}".strip().splitlines()[0].rstrip(": ") or "failed"
    except BaseException:
        return type(error).__name__ or "failed"
