"""Parses the test formats of public benchmarks: Python code, programs that read and print, and calls of a function."""

from __future__ import annotations

import base64
import io
import json
import math
import pickle
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NoReturn

_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?", re.ASCII)
_METHOD = re.compile(r"class\s+Solution\b[^\n]*:\s*(?:\"\"\".*?\"\"\"\s*)?def\s+(\w+)", re.DOTALL)
_FUNCTION = re.compile(r"^\s*def\s+([a-zA-Z]\w*)", re.MULTILINE)
_BLANKS = re.compile(r"\s*")
_NAME_KEYS = ("fn_name", "func_name")

SameOutput = Callable[[str, str], bool]


@dataclass(frozen=True, slots=True)
class Programs:
    """Input and expected output of each program run, and the comparison of outputs."""

    cases: Sequence[tuple[str, str]]
    same: SameOutput


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of `function`, which may be a method of the class `Solution`: arguments and accepted results."""

    function: str
    cases: Sequence[tuple[list[Any], list[Any]]]


def same_output(printed: str, expected: str) -> bool:
    """Whether two outputs have the same lines, apart from blanks at their ends and empty lines at the end."""
    first, second = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (printed, expected))
    return first == second


def same_decimals(printed: str, expected: str) -> bool:
    """The comparison of LiveCodeBench: lines without blanks around them, whose numbers are equal as decimals."""
    return _same_lines(printed, expected, lambda one, other: Decimal(one) == Decimal(other))


def same_floats(printed: str, expected: str) -> bool:
    """The comparison of APPS and TACO: as `same_decimals`, but fractional numbers may differ by a relative 1e-5 or an absolute 1e-8."""

    def close(one: str, other: str) -> bool:
        if Decimal(one) == Decimal(other):
            return True
        fraction = any(mark in number for mark in ".eE" for number in (one, other))
        return fraction and math.isclose(float(one), float(other), rel_tol=1e-5, abs_tol=1e-8)

    return _same_lines(printed, expected, close)


def _same_lines(printed: str, expected: str, equal: Callable[[str, str], bool]) -> bool:
    first, second = (text.strip().splitlines() for text in (printed, expected))
    return len(first) == len(second) and all(_same_line(one, other, equal) for one, other in zip(first, second, strict=True))


def _same_line(one: str, other: str, equal: Callable[[str, str], bool]) -> bool:
    if one.strip() == other.strip():
        return True
    pairs = list(zip(one.split(), other.split(), strict=False))
    if len(one.split()) != len(other.split()):
        return False
    return all(a == b or (_NUMBER.fullmatch(a) and _NUMBER.fullmatch(b) and equal(a, b)) for a, b in pairs)


def cases_of(tests: object, fields: Mapping[str, object], prompt: str) -> Programs | Calls | None:
    """The cases in the column of tests; None if these are Python. `fields` and `prompt` may name the function. Raises ValueError."""
    if isinstance(tests, Mapping):
        if not {"inputs", "outputs"} <= tests.keys() or len(tests["inputs"]) != len(tests["outputs"]) or not len(tests["inputs"]):
            raise ValueError(f"a mapping must have `inputs` and `outputs` of the same length, got the keys {', '.join(map(str, tests))}")
        pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
        if name := _named(tests) or _named(fields):
            wrapped = all(isinstance(output, list) and len(output) == 1 for _, output in pairs)
            return Calls(name, [_call(arguments, output, wrapped) for arguments, output in pairs])
        return Programs([(_joined(one), _joined(other)) for one, other in pairs], same_floats)
    if not isinstance(tests, list | tuple) or not tests or not all(isinstance(each, Mapping) for each in tests):
        return None
    if not all({"input", "output"} <= each.keys() for each in tests):
        raise ValueError("a case must have `input` and `output`")
    kinds = {"functional" if each.get("testtype") == "functional" or _named(each) else "stdin" for each in tests}
    if len(kinds) > 1:
        raise ValueError("some cases are functional and others are not")
    if kinds == {"stdin"}:
        same = same_decimals if any("testtype" in each for each in tests) else same_output
        return Programs([(_joined(each["input"]), _joined(each["output"])) for each in tests], same)
    name = _named(tests[0]) or _named(fields) or _starter(fields, prompt)
    if not name:
        raise ValueError("functional cases need the name of the function in metadata.func_name, fn_name, entry_point or starter_code")
    return Calls(name, [_call(each["input"], each["output"], False) for each in tests])


def parsed(tests: object) -> object:
    """The tests, if they are text in JSON or the packed form of LiveCodeBench's private tests; any other value as it is."""
    if not isinstance(tests, str):
        return tests
    text = _unpacked(tests) if tests.startswith("eJ") else tests
    if text.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(text)
        except ValueError:
            return tests  # Python that begins with a list
    return tests


class _Texts(pickle.Unpickler):
    """An unpickler that loads text only."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} in packed tests")


def _unpacked(packed: str) -> str:
    """A text that was pickled, compressed and written in base64."""
    try:
        text = _Texts(io.BytesIO(zlib.decompress(base64.b64decode(packed, validate=True)))).load()
    except (ValueError, EOFError, zlib.error, pickle.UnpicklingError) as error:
        raise ValueError(f"packed tests cannot be read: {error}") from error
    if not isinstance(text, str):
        raise ValueError("packed tests are no text")
    return text


def _named(row: Mapping[str, Any]) -> str:
    """The function that a row, a case or its metadata names, or an empty text."""
    metadata = row.get("metadata")
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except ValueError:
            metadata = None
    for source in (row, metadata if isinstance(metadata, Mapping) else {}):
        for key in _NAME_KEYS:
            if isinstance(name := source.get(key), str) and name.isidentifier():
                return name
    return ""


def _starter(fields: Mapping[str, object], prompt: str) -> str:
    """The function that `entry_point` or the starter code defines, which may be in the prompt."""
    entry_point, starter = (fields.get(key) for key in ("entry_point", "starter_code"))
    if isinstance(entry_point, str) and entry_point:
        return entry_point.removeprefix("Solution().").removeprefix("Solution.")
    for pattern, text in ((_METHOD, starter), (_FUNCTION, starter), (_METHOD, prompt)):
        if isinstance(text, str) and (match := pattern.search(text)):
            return match[1]
    return ""


def _call(arguments: Any, output: Any, wrapped: bool) -> tuple[list[Any], list[Any]]:
    """Arguments and accepted results. `wrapped`: each output of the row is a list of one item, and APPS accepts the bare item too."""
    if isinstance(arguments, str):
        expected = [_value(output)] if isinstance(output, str) else [output]
        return _values(arguments), expected
    passed = list(arguments) if isinstance(arguments, list | tuple) else [arguments]
    if passed and isinstance(passed[0], Mapping):
        passed[0] = _with_numbers(passed[0])
    results = [output, output[0]] if wrapped else [output]
    return passed, results + [_with_numbers(each) for each in results if isinstance(each, Mapping)]


def _values(text: str) -> list[Any]:
    """The JSON values in a text, one a line."""
    decoder, values, at = json.JSONDecoder(), [], 0
    while (at := _after_blanks(text, at)) < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except ValueError as error:
            raise ValueError(f"input of a functional case is not JSON: {text[:60]!r}") from error
        values.append(value)
    return values


def _after_blanks(text: str, at: int) -> int:
    match = _BLANKS.match(text, at)
    return match.end() if match else at


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _with_numbers(value: Mapping[str, Any]) -> Mapping[Any, Any]:
    """The mapping with numeric keys restored, which JSON writes as strings."""
    try:
        return {int(key): each for key, each in value.items()}
    except ValueError:
        return value


def _joined(text: object) -> str:
    return "\n".join(map(str, text)) if isinstance(text, list | tuple) else str(text)
