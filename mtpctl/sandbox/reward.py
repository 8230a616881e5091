"""The reward `code`: run the answer's Python against the problem's tests, in the sandbox."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from mtpctl.sandbox.cases import Calls, Programs, cases_of, parsed, same_output
from mtpctl.sandbox.fences import code_of
from mtpctl.sandbox.limits import Limits
from mtpctl.sandbox.sandbox import Isolation, Sandbox
from mtpctl.sandbox.shared import shared

if TYPE_CHECKING:
    from mtpctl.samples import Sample


class Asked(Protocol):
    """What is read of a problem (`mtpctl.data.problems.Problem`)."""

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
    problem: Asked,
    sample: Sample,
    *,
    tests: str = "tests",
    timeout_s: float = 5.0,
    memory_mb: int = 512,
    partial: bool = False,
    isolation: Isolation = "required",
) -> dict[str, float]:
    """1 where the response's code passes all tests of the problem, or with `partial` the share that it passes.

    The code is the last fenced Python block of the response (`fences.code_of`), or the whole response if it has no block. The tests are the
    column `tests`:

    - a list of Python texts, such as `assert add(1, 2) == 3`: one passes where it ends without an exception;
    - Python as one text, which is one test; where it defines `check` and the column `entry_point` names a function, as HumanEval has
      it, `check` is called with that function;
    - a list of `{input, output}`, or `{inputs: [...], outputs: [...]}`: programs that read and print. Without `partial` the first case
      that fails is the last that runs;
    - `{inputs, outputs, fn_name}` as in APPS and TACO, or a list of `{input, output, testtype: functional}` as in LiveCodeBench:
      calls of a function or of a method of `Solution`;
    - any of these as a text of JSON.

    `docs/sandbox.md` describes how outputs and results are compared.

    Without that column the code's output is compared with the problem's answer. `timeout_s` are CPU seconds, for each case, and for all
    Python tests together; on the wall it may take three times as long and a second. Raises ValueError for tests that are none of these.
    """
    sandbox, limits = shared(isolation), Limits(cpu_s=timeout_s, memory_mb=memory_mb)
    given = problem.fields.get(tests)
    try:
        if given is None or given == "":
            cases: Programs | Calls | None = Programs([("", problem.answer)], same_output)
        else:
            given = parsed(given)
            cases = cases_of(given, problem.fields, problem.prompt)
        if isinstance(cases, Programs):
            passed, timed_out = _programs(sandbox, code_of(response), cases, limits, partial)
        elif isinstance(cases, Calls):
            passed, timed_out = _calls(sandbox, code_of(response, ("Solution", cases.function)), cases, limits, partial)
        else:
            passed, timed_out = _asserts(sandbox, response, given, problem.fields.get("entry_point"), limits)
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"{problem.prompt_id}: column {tests}: {error}") from error
    return {"reward": passed if partial else float(passed == 1.0), "passed": passed, "timed_out": float(timed_out)}


def _asserts(sandbox: Sandbox, response: str, given: object, entry_point: object, limits: Limits) -> tuple[float, bool]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(each, str) for each in texts):
        raise ValueError(f"neither a list of Python tests nor one of input and output: {str(given)[:80]!r}")
    name = entry_point if isinstance(entry_point, str) and entry_point.isidentifier() else None
    tests = [str(each) for each in texts]
    if name and re.search(r"^def check\(", tests[-1], re.MULTILINE):
        tests[-1] += f"\n\ncheck({name})\n"
    code = code_of(response, _free_names(tests))
    judged = sandbox.judge(code, tests, entry_point=name, limits=limits)
    return judged.passed, judged.timed_out


def _free_names(tests: list[str]) -> set[str]:
    """Free names of the tests that are not built-ins. Raises SyntaxError."""
    nodes = [node for test in tests for node in ast.walk(ast.parse(test))]
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    return read - bound - set(dir(builtins))


def _calls(sandbox: Sandbox, code: str, calls: Calls, limits: Limits, partial: bool) -> tuple[float, bool]:
    """Run the cases in one process until its time is up, and the rest in new processes, so that each case may use the whole limit."""
    passed: list[bool] = []
    timed_out = False
    while len(passed) < len(calls.cases) and (partial or all(passed)):
        judged = sandbox.judge_calls(code, calls.function, calls.cases[len(passed) :], limits=limits)
        decided = judged.failures[: judged.decided] if judged.timed_out else judged.failures
        timed_out |= judged.timed_out and not decided
        passed += [each is None for each in decided or judged.failures[:1]]
    return sum(passed) / len(calls.cases), timed_out


def _programs(sandbox: Sandbox, code: str, programs: Programs, limits: Limits, partial: bool) -> tuple[float, bool]:
    passed, timed_out = 0, False
    for given, expected in programs.cases:
        result = sandbox.run(code, stdin=given, limits=limits)
        right = result.ok and programs.same(result.stdout, expected)
        passed += right
        timed_out |= result.timed_out
        if not right and not partial:
            break
    return passed / len(programs.cases), timed_out
