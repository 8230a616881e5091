"""Prevents tests from running text of the answer that they judge, for example by `eval(f(x))` or `pickle.loads(f(x))`.

An audit hook checks every code object before it runs and every class that a pickle names. Python code cannot remove such a hook. Everything
is allowed until the process has received data from the answer. After that, code may run in these cases:

- it is the tests' own, or a string constant that they pass to `eval`, `exec` or `compile`;
- it contains no names, such as `[1, 2 + 3]`, so it cannot access any object;
- a module is imported, or `collections` and `dataclasses` build a class: they check the names that they are given.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import sys
from collections.abc import Callable
from contextlib import suppress
from types import CodeType, FrameType

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
    """Watches the tests of this process. `refused`: what the current test tried to run, empty if nothing."""

    def __init__(self, tests: list[str], received: Callable[[], bool]) -> None:
        self.refused = ""
        self._tests, self._received = tests, received
        self._own: set[CodeType] = set()
        self._constants: frozenset[CodeType] | None = None
        sys.addaudithook(self._check)

    def compiled(self, code: CodeType) -> CodeType:
        """Code of the tests, which may run."""
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
        if code in self._own or _names_nothing(code) or caller.f_code.co_filename in _BUILDERS or _imports(caller):
            return True
        if self._constants is None:
            self._constants = frozenset(each for test in self._tests for each in _compiled_constants(test))
        return code in self._constants


def _names_nothing(code: CodeType) -> bool:
    return not code.co_names and not any(isinstance(each, CodeType) for each in code.co_consts)


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
