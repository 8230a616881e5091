"""The reward `code`: run the answer's Python against the problem's tests, in the sandbox."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from mtpctl.sandbox.limits import Limits
from mtpctl.sandbox.sandbox import Isolation, Sandbox
from mtpctl.sandbox.shared import shared

if TYPE_CHECKING:
    from mtpctl.samples import Sample

_BLOCK = re.compile(r"^[ \t]*(```+|~~~+)[ \t]*(?:python3?|py)?[ \t]*\n(.*?)^[ \t]*\1[ \t]*$", re.DOTALL | re.MULTILINE | re.IGNORECASE)
_OPEN = re.compile(r"^[ \t]*(?:```+|~~~+)[ \t]*(?:python3?|py)[ \t]*\n", re.MULTILINE | re.IGNORECASE)


class Asked(Protocol):
    """What is read of a problem (`mtpctl.data.problems.Problem`)."""

    @property
    def prompt_id(self) -> str: ...
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

    The code is the last fenced Python block of the response, or all of it where there is no block. The tests are the column `tests`:

    - a list of Python texts, such as `assert add(1, 2) == 3`: one passes where it ends without an exception;
    - Python as one text, which is one test; where it defines `check` and the column `entry_point` names a function, as HumanEval has
      it, `check` is called with that function;
    - a list of `{input, output}`, or `{inputs: [...], outputs: [...]}`: programs that read and print. Output is compared line by line
      without blanks at the ends of lines. Without `partial` the first case that fails is the last that runs;
    - any of these as a text of JSON.

    Without that column the code's output is compared with the problem's answer. `timeout_s` are CPU seconds, for each case, and for all
    Python tests together; on the wall it may take three times as long and a second. Raises ValueError for tests that are none of these.
    """
    sandbox, code = shared(isolation), code_of(response)
    limits = Limits(cpu_s=timeout_s, memory_mb=memory_mb)
    given = problem.fields.get(tests)
    try:
        if given is None or given == "":
            passed, timed_out = _programs(sandbox, code, [("", problem.answer)], limits, partial)
        else:
            given = _parsed(given)
            cases = _cases(given)
            if cases is None:
                passed, timed_out = _asserts(sandbox, code, given, problem.fields.get("entry_point"), limits)
            else:
                passed, timed_out = _programs(sandbox, code, cases, limits, partial)
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"{problem.prompt_id}: column {tests}: {error}") from error
    return {"reward": passed if partial else float(passed == 1.0), "passed": passed, "timed_out": float(timed_out)}


def code_of(response: str) -> str:
    """The last fenced block that is Python or names no language, one that was cut off among them; without any, the whole text."""
    blocks = list(_BLOCK.finditer(response))
    rest = response[blocks[-1].end() :] if blocks else response
    if cut := _OPEN.search(rest):
        return rest[cut.end() :]
    return blocks[-1][2] if blocks else response


def same_output(printed: str, expected: str) -> bool:
    """Whether two outputs have the same lines, but for blanks at their ends and empty lines at the end."""
    first, second = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (printed, expected))
    return first == second


def _parsed(given: object) -> object:
    if isinstance(given, str) and given.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(given)
        except ValueError:
            return given  # Python that begins with a list
    return given


def _cases(given: object) -> list[tuple[str, str]] | None:
    """Input and output of programs; None where the tests are Python."""
    if isinstance(given, Mapping):
        if not {"inputs", "outputs"} <= given.keys() or len(given["inputs"]) != len(given["outputs"]) or not given["inputs"]:
            raise ValueError(f"a mapping has `inputs` and `outputs` of one length, and not {', '.join(map(str, given))}")
        return [(_joined(one), _joined(other)) for one, other in zip(given["inputs"], given["outputs"], strict=True)]
    if isinstance(given, list | tuple) and given and all(isinstance(each, Mapping) for each in given):
        if not all({"input", "output"} <= each.keys() for each in given):
            raise ValueError("a case has `input` and `output`")
        return [(_joined(each["input"]), _joined(each["output"])) for each in given]
    return None


def _joined(text: object) -> str:
    return "\n".join(map(str, text)) if isinstance(text, list | tuple) else str(text)


def _asserts(sandbox: Sandbox, code: str, given: object, entry_point: object, limits: Limits) -> tuple[float, bool]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(each, str) for each in texts):
        raise ValueError(f"neither a list of Python tests nor one of input and output: {str(given)[:80]!r}")
    name = entry_point if isinstance(entry_point, str) and entry_point.isidentifier() else None
    tests = [str(each) for each in texts]
    if name and re.search(r"^def check\(", tests[-1], re.MULTILINE):
        tests[-1] += f"\n\ncheck({name})\n"
    judged = sandbox.judge(code, tests, entry_point=name, limits=limits)
    return judged.passed, judged.timed_out


def _programs(sandbox: Sandbox, code: str, cases: list[tuple[str, str]], limits: Limits, partial: bool) -> tuple[float, bool]:
    passed, timed_out = 0, False
    for given, expected in cases:
        result = sandbox.run(code, stdin=given, limits=limits)
        right = result.ok and same_output(result.stdout, expected)
        passed += right
        timed_out |= result.timed_out
        if not right and not partial:
            break
    return passed / len(cases), timed_out
