"""The code of the tests' process: runs tests, or calls with expected results, against an answer in another process."""

from __future__ import annotations

import builtins
import importlib
import linecache
import sys
from collections.abc import Callable
from contextlib import suppress
from types import CodeType
from typing import Any, NoReturn, cast

from mtpctl.sandbox.guard import TEST_FILE, Guard
from mtpctl.sandbox.questions import PeerGone, TestsEnd
from mtpctl.sandbox.remote import Remote
from mtpctl.sandbox.values import decode
from mtpctl.sandbox.verdicts import VerdictWriter

Space = dict[str, object]


def run_tests(tests: list[str], names: list[str], entry_points: list[str], end: TestsEnd, verdicts: VerdictWriter) -> None:
    """Run the tests in one namespace, and report each. `names`: the free names of the tests; `entry_points` always refer to the answer."""
    guard = Guard(tests, lambda: end.received)
    space: Space = {"__name__": "__main__", "__builtins__": builtins}
    error = _begin(end, lambda: space.update(end.fetch([name for name in names if not _is_own(name, space, entry_points)])))
    for number, test in enumerate(tests):
        file = f"{TEST_FILE}{number}"

        def run(test: str = test, file: str = file) -> None:
            exec(guard.compiled(compiled(test, file)), space)

        verdicts.write(error or _outcome(run, end, guard))


def run_calls(function: str, cases: list[object], end: TestsEnd, verdicts: VerdictWriter) -> None:
    """Call the answer's function with the arguments of each case, and report whether the result is accepted.

    A case is a list of arguments and accepted results, as `values.encode` writes it.
    """
    space: Space = {}
    error = _begin(end, lambda: space.update(end.fetch(["Solution", function])))
    error = error or _outcome(lambda: space.update(function=_callable(space, function)), end)
    for case in cases:
        arguments, results = decode(case, _no_reference)

        def run(arguments: list[Any] = arguments, results: list[Any] = results) -> None:
            result = _as_json(cast("Callable[..., object]", space["function"])(*arguments))
            if not any(result == each for each in results):
                raise AssertionError("another result")

        outcome = error or _outcome(run, end)
        if end.gone:  # probably out of time: the caller handles this case and the rest
            return
        verdicts.write(outcome)


def _no_reference(kind: str, rest: list[Any]) -> NoReturn:
    raise TypeError(f"{kind} in a case")


def _callable(space: Space, function: str) -> object:
    """The method of an object of the answer's class `Solution`, or the function."""
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


def _begin(end: TestsEnd, fetch: Callable[[], object]) -> str:
    """Wait for the answer's code and fetch its objects. Returns the reason if no test can run, else an empty text."""
    try:
        if error := end.begin():
            return error
        fetch()
    except PeerGone:
        return "the answer's process ended before the tests began"
    return ""


def _outcome(run: Callable[[], None], end: TestsEnd, guard: Guard | None = None) -> str:
    """The reason why a test failed, else an empty text. It always fails if the answer's process is gone or the guard refused text."""
    error = end.gone
    if not error:
        try:
            run()
        except BaseException as raised:
            with end.silence():
                error = in_a_line(raised)
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


def in_a_line(error: BaseException) -> str:
    """Class and message of an exception, whatever its `__str__` does; never empty."""
    try:
        return f"{type(error).__name__}: {error}".strip().splitlines()[0].rstrip(": ") or "failed"
    except BaseException:
        return type(error).__name__ or "failed"
