"""The reward `code`: runs the answer's Python against the problem's tests, in the sandbox.

Tests may have the formats of public benchmarks: Python code, programs that read and print, and calls of a function.
"""

from __future__ import annotations

import ast
import base64
import builtins
import io
import json
import math
import pickle
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from mtpctl.sandbox.fences import extract_code
from mtpctl.sandbox.sandbox import Isolation, Sandbox, shared
from mtpctl.sandbox.session import Limits

if TYPE_CHECKING:
    from mtpctl.samples import Sample


_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?", re.ASCII)
_METHOD = re.compile(r"class\s+Solution\b[^\n]*:\s*(?:\"\"\".*?\"\"\"\s*)?def\s+(\w+)", re.DOTALL)
_FUNCTION = re.compile(r"^\s*def\s+([a-zA-Z]\w*)", re.MULTILINE)
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


class Problem(Protocol):
    """The fields of `mtpctl.data.problems.Problem` that the reward uses."""

    @property
    def prompt_id(self) -> str: ...
    @property
    def prompt(self) -> str: ...
    @property
    def answer(self) -> str: ...
    @property
    def fields(self) -> Mapping[str, object]: ...


def score(
    response: str,
    problem: Problem,
    sample: Sample,
    *,
    tests: str = "tests",
    timeout_s: float = 5.0,
    memory_mb: int = 512,
    partial: bool = False,
    isolation: Isolation = "required",
) -> dict[str, float]:
    """Return 1 if the response's code passes all tests of the problem, else 0; with `partial`, the share of tests that pass.

    The code is the last fenced Python block of the response (`fences.extract_code`), or the whole response if it has no block. The tests
    are in the column `tests`:

    - a list of Python code, such as `assert add(1, 2) == 3`: a test passes if it raises no exception;
    - Python code as one text, which is one test. If it defines `check` and the column `entry_point` names a function, as in HumanEval,
      `check` is called with that function;
    - a list of `{input, output}`, or `{inputs: [...], outputs: [...]}`: programs that read and print. Without `partial` no case runs after
      the first failure;
    - `{inputs, outputs, fn_name}` as in APPS and TACO, or a list of `{input, output, testtype: functional}` as in LiveCodeBench:
      calls of a function or of a method of `Solution`;
    - any of these as JSON text.

    `docs/sandbox.md` describes how outputs and results are compared. Without the column, the code's output is compared with the problem's
    answer. `timeout_s` limits the CPU seconds of each case, and of all Python tests together; the wall-clock limit is three times that,
    plus 1 s. Raises ValueError for tests in any other format.
    """
    sandbox, limits = shared(isolation), Limits(cpu_s=timeout_s, memory_mb=memory_mb)
    test_column = problem.fields.get(tests)
    try:
        if test_column is None or test_column == "":
            cases: Programs | Calls | None = Programs([("", problem.answer)], same_output)
        else:
            test_column = parse_tests(test_column)
            cases = parse_cases(test_column, problem.fields, problem.prompt)
        if isinstance(cases, Programs):
            passed, timed_out = _run_programs(sandbox, extract_code(response), cases, limits, partial)
        elif isinstance(cases, Calls):
            passed, timed_out = _run_calls(sandbox, extract_code(response, ("Solution", cases.function)), cases, limits, partial)
        else:
            passed, timed_out = _run_asserts(sandbox, response, test_column, problem.fields.get("entry_point"), limits)
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"{problem.prompt_id}: column {tests}: {error}") from error
    return {"reward": passed if partial else float(passed == 1.0), "passed": passed, "timed_out": float(timed_out)}


def _run_asserts(sandbox: Sandbox, response: str, column: object, entry_point: object, limits: Limits) -> tuple[float, bool]:
    texts = [column] if isinstance(column, str) else column
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"neither a list of Python tests nor one of input and output: {str(column)[:80]!r}")
    name = entry_point if isinstance(entry_point, str) and entry_point.isidentifier() else None
    tests = [str(text) for text in texts]
    if name and re.search(r"^def check\(", tests[-1], re.MULTILINE):
        tests[-1] += f"\n\ncheck({name})\n"
    code = extract_code(response, _free_names(tests))
    judgement = sandbox.judge(code, tests, entry_point=name, limits=limits)
    return judgement.passed, judgement.timed_out


def _free_names(tests: list[str]) -> set[str]:
    """Free names of the tests that are not built-ins. Raises SyntaxError."""
    nodes = [node for test in tests for node in ast.walk(ast.parse(test))]
    read_names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    bound_names = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound_names |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)}
    bound_names |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    return read_names - bound_names - set(dir(builtins))


def _run_calls(sandbox: Sandbox, code: str, calls: Calls, limits: Limits, partial: bool) -> tuple[float, bool]:
    """Run the cases in one process. After a timeout, continue in a new process, so that each case may use the whole time limit.

    Cases without a verdict at a timeout run again in the new process. If the first case of a process has no verdict, it has failed.
    """
    passed: list[bool] = []
    timed_out = False
    while len(passed) < len(calls.cases) and (partial or all(passed)):
        judgement = sandbox.judge_calls(code, calls.function, calls.cases[len(passed) :], limits=limits)
        outcomes = judgement.failures[: judgement.decided] if judgement.timed_out else judgement.failures
        timed_out |= judgement.timed_out and not outcomes
        passed += [failure is None for failure in outcomes or judgement.failures[:1]]
    return sum(passed) / len(calls.cases), timed_out


def _run_programs(sandbox: Sandbox, code: str, programs: Programs, limits: Limits, partial: bool) -> tuple[float, bool]:
    passed, timed_out = 0, False
    for stdin, expected in programs.cases:
        result = sandbox.run(code, stdin=stdin, limits=limits)
        correct = result.ok and programs.same(result.stdout, expected)
        passed += correct
        timed_out |= result.timed_out
        if not correct and not partial:
            break
    return passed / len(programs.cases), timed_out


def same_output(printed: str, expected: str) -> bool:
    """Whether two outputs have the same lines, ignoring trailing blanks and empty lines at the end."""
    printed_lines, expected_lines = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (printed, expected))
    return printed_lines == expected_lines


def same_decimals(printed: str, expected: str) -> bool:
    """Compare as LiveCodeBench: stripped lines, with numbers compared as decimals."""
    return _same_lines(printed, expected, lambda first, second: Decimal(first) == Decimal(second))


def same_floats(printed: str, expected: str) -> bool:
    """Compare as APPS and TACO: like `same_decimals`, but fractional numbers may differ by a relative 1e-5 or an absolute 1e-8."""

    def close(first: str, second: str) -> bool:
        if Decimal(first) == Decimal(second):
            return True
        fraction = any(mark in number for mark in ".eE" for number in (first, second))
        return fraction and math.isclose(float(first), float(second), rel_tol=1e-5, abs_tol=1e-8)

    return _same_lines(printed, expected, close)


def _same_lines(printed: str, expected: str, equal: Callable[[str, str], bool]) -> bool:
    first_lines, second_lines = (text.strip().splitlines() for text in (printed, expected))
    return len(first_lines) == len(second_lines) and all(
        _same_line(first_line, second_line, equal) for first_line, second_line in zip(first_lines, second_lines, strict=True)
    )


def _same_line(first: str, second: str, equal: Callable[[str, str], bool]) -> bool:
    if first.strip() == second.strip():
        return True
    pairs = list(zip(first.split(), second.split(), strict=False))
    if len(first.split()) != len(second.split()):
        return False
    return all(
        first_word == second_word or (_NUMBER.fullmatch(first_word) and _NUMBER.fullmatch(second_word) and equal(first_word, second_word))
        for first_word, second_word in pairs
    )


def parse_cases(tests: object, fields: Mapping[str, object], prompt: str) -> Programs | Calls | None:
    """The cases in the column of tests; None if it contains Python code. `fields` and `prompt` may name the function. Raises ValueError."""
    if isinstance(tests, Mapping):
        if not {"inputs", "outputs"} <= tests.keys() or len(tests["inputs"]) != len(tests["outputs"]) or not len(tests["inputs"]):
            raise ValueError(f"a mapping must have `inputs` and `outputs` of the same length, got the keys {', '.join(map(str, tests))}")
        pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
        if name := _function_name(tests) or _function_name(fields):
            is_wrapped = all(isinstance(output, list) and len(output) == 1 for _, output in pairs)
            return Calls(name, [_parse_call(arguments, output, is_wrapped) for arguments, output in pairs])
        return Programs([(_join_lines(stdin), _join_lines(stdout)) for stdin, stdout in pairs], same_floats)
    if not isinstance(tests, list | tuple) or not tests or not all(isinstance(case, Mapping) for case in tests):
        return None
    if not all({"input", "output"} <= case.keys() for case in tests):
        raise ValueError("a case must have `input` and `output`")
    kinds = {"functional" if case.get("testtype") == "functional" or _function_name(case) else "stdin" for case in tests}
    if len(kinds) > 1:
        raise ValueError("some cases are functional and others are not")
    if kinds == {"stdin"}:
        same = same_decimals if any("testtype" in case for case in tests) else same_output
        return Programs([(_join_lines(case["input"]), _join_lines(case["output"])) for case in tests], same)
    name = _function_name(tests[0]) or _function_name(fields) or _find_function(fields, prompt)
    if not name:
        raise ValueError("functional cases need the name of the function in metadata.func_name, fn_name, entry_point or starter_code")
    return Calls(name, [_parse_call(case["input"], case["output"], False) for case in tests])


def parse_tests(tests: object) -> object:
    """Parse tests that are JSON text or in the packed form of LiveCodeBench's private tests; return other values unchanged."""
    if not isinstance(tests, str):
        return tests
    text = _unpack_tests(tests) if tests.startswith("eJ") else tests
    if text.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(text)
        except ValueError:
            return tests  # Python that begins with a list
    return tests


class _TextUnpickler(pickle.Unpickler):
    """Unpickler that loads text only."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} in packed tests")


def _unpack_tests(packed: str) -> str:
    """Decode text that was pickled, compressed and encoded in base64."""
    try:
        text = _TextUnpickler(io.BytesIO(zlib.decompress(base64.b64decode(packed, validate=True)))).load()
    except (ValueError, EOFError, zlib.error, pickle.UnpicklingError) as error:
        raise ValueError(f"packed tests cannot be read: {error}") from error
    if not isinstance(text, str):
        raise ValueError("packed tests are not text")
    return text


def _function_name(row: Mapping[str, Any]) -> str:
    """The function that a row, a case or its metadata names; empty if there is none."""
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


def _find_function(fields: Mapping[str, object], prompt: str) -> str:
    """The function named by `entry_point`, or defined in the starter code, which may be in the prompt."""
    entry_point, starter = (fields.get(key) for key in ("entry_point", "starter_code"))
    if isinstance(entry_point, str) and entry_point:
        return entry_point.removeprefix("Solution().").removeprefix("Solution.")
    for pattern, text in ((_METHOD, starter), (_FUNCTION, starter), (_METHOD, prompt)):
        if isinstance(text, str) and (match := pattern.search(text)):
            return match[1]
    return ""


def _parse_call(arguments: Any, output: Any, is_wrapped: bool) -> tuple[list[Any], list[Any]]:
    """Arguments and accepted results. `is_wrapped`: every output of the row is a list of one item, which is accepted too, as in APPS."""
    if isinstance(arguments, str):
        expected = [_parse_json_or_text(output)] if isinstance(output, str) else [output]
        return _parse_json_lines(arguments), expected
    call_arguments = list(arguments) if isinstance(arguments, list | tuple) else [arguments]
    if call_arguments and isinstance(call_arguments[0], Mapping):
        call_arguments[0] = _with_integer_keys(call_arguments[0])
    results = [output, output[0]] if is_wrapped else [output]
    return call_arguments, results + [_with_integer_keys(result) for result in results if isinstance(result, Mapping)]


def _parse_json_lines(text: str) -> list[Any]:
    """The JSON values in a text, one per line."""
    decoder, values, remaining = json.JSONDecoder(), [], text.lstrip()
    while remaining:
        try:
            value, end = decoder.raw_decode(remaining)
        except ValueError as error:
            raise ValueError(f"input of a functional case is not JSON: {text[:60]!r}") from error
        values.append(value)
        remaining = remaining[end:].lstrip()
    return values


def _parse_json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _with_integer_keys(value: Mapping[str, Any]) -> Mapping[Any, Any]:
    """The mapping with integer keys, if all keys are integers that JSON stored as strings."""
    try:
        return {int(key): item for key, item in value.items()}
    except ValueError:
        return value


def _join_lines(text: object) -> str:
    return "\n".join(map(str, text)) if isinstance(text, list | tuple) else str(text)
