"""The reward `code` on rows of public benchmarks."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from collections.abc import Mapping, Sequence
from typing import cast

import pytest

from mtpctl.data.problems import Problem
from mtpctl.samples import Sample
from mtpctl.sandbox.reward import Calls, _run_calls, same_decimals, same_floats, score
from mtpctl.sandbox.sandbox import Sandbox
from mtpctl.sandbox.session import Judgement, Limits

SAMPLE = Sample("p", "g", [1])
STARTER = "class Solution:\n    def addUp(self, nums: List[int], k: int) -> int:\n        "
METHOD = "class Solution:\n    def addUp(self, nums: List[int], k: int) -> int:\n        return sum(nums) * k\n"
FUNCTION = "def addUp(nums, k): return sum(nums) * k"
TWICE = [{"input": "[1, 2]\n3", "output": "9", "testtype": "functional"}, {"input": "[]\n\n1\n", "output": "0", "testtype": "functional"}]
NAMED = [case | {"metadata": {"func_name": "addUp"}} for case in TWICE]
APPS = {"inputs": [[[1, 2], 3], [[], 1]], "outputs": [[9], [0]], "fn_name": "addUp"}


def reward(response: str, fields: Mapping[str, object], prompt: str = "", **arguments: object) -> float:
    problem = Problem("rows.jsonl:1", prompt, "", fields=fields)
    return score(response, problem, SAMPLE, **arguments)["reward"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"tests": APPS}, ""),
        ({"tests": json.dumps(APPS)}, ""),
        ({"tests": {**APPS, "outputs": [9, 0]}}, ""),
        ({"tests": {key: APPS[key] for key in ("inputs", "outputs")}, "fn_name": "addUp"}, ""),
        ({"tests": {"inputs": ["[1, 2]\n3", "[]\n1"], "outputs": ["9", "0"], "fn_name": "addUp"}}, ""),
        ({"tests": TWICE, "starter_code": STARTER}, ""),
        ({"tests": json.dumps(TWICE), "metadata": '{"func_name": "addUp"}'}, ""),
        ({"tests": NAMED}, ""),
        ({"tests": TWICE, "entry_point": "Solution().addUp"}, ""),
        ({"tests": TWICE}, f"Solve it.\n```python\n{STARTER}\n```"),
        ({"tests": base64.b64encode(zlib.compress(pickle.dumps(json.dumps(NAMED)))).decode()}, ""),
    ],
)
def test_functions_and_methods_pass_functional_tests(fields: Mapping[str, object], prompt: str) -> None:
    for answer in (METHOD, FUNCTION, f"Text:\n~~~python\n{METHOD}~~~\nUse it:\n```python\nprint(Solution().addUp([1], 2))\n```"):
        assert reward(answer, fields, prompt) == 1.0
    for answer in (
        FUNCTION.replace("* k", "+ k"),
        "x = 1",
        "",
        "print(9)",
        "class Solution: pass",
        "class Solution:\n    def __init__(self): 1 / 0",
    ):
        assert reward(answer, fields, prompt) == 0.0


@pytest.mark.parametrize(
    ("output", "result", "right"),
    [
        ([[1, 2]], "[1, 2]", True),
        ([[1, 2]], "(1, 2)", True),
        ([[[1, 2], [3]]], "[(1, 2), (3,)]", True),
        ([1, 2], "[1, 2]", True),
        ([1, 2], "1", False),
        ([1, 2], "[1]", False),
        ([[1, 2]], "1", False),
        ([[1, 2]], "[2, 1]", False),
        (["a"], "'a'", True),
        ("a", "'a'", True),
        ("12", "12", False),
        ([True], "True", True),
        ([None], "None", True),
        ([{"1": 2}], "{1: 2}", True),
        ([{"a": 2}], "{'a': 2}", True),
        ([0.5], "0.5", True),
        ([0.3], "0.1 + 0.2", False),
        ([[1]], "type('A', (), {'__eq__': lambda s, o: True})()", False),
        ([[1]], "type('A', (list,), {'__eq__': lambda s, o: True})()", False),
    ],
)
def test_results_are_compared_as_in_apps_and_partial_results_fail(output: object, result: str, right: bool) -> None:
    fields = {"tests": {"inputs": [[1]], "outputs": [output], "fn_name": "f"}}
    assert reward(f"def f(x): return {result}", fields) == float(right)


def test_numeric_keys_are_restored_from_json() -> None:
    fields = {"tests": {"inputs": [[{"1": 5}]], "outputs": [[5]], "fn_name": "f"}}
    assert reward("def f(x): return x[1]", fields) == 1.0


def test_common_modules_need_no_import_but_are_no_answer() -> None:
    fields = {"tests": {"inputs": [[[3, 1]]], "outputs": [[4]], "fn_name": "f"}}
    code = "def f(x: List[int]) -> Optional[int]: return Counter(x).total() + reduce(gcd, x) - 1 + len(deque()) if inf else math.pi"
    assert reward(code.replace("Counter(x).total()", "sum(x)"), fields) == 1.0
    library = {"tests": {"inputs": [[4, 6]], "outputs": [[2]], "fn_name": "gcd"}}
    assert reward("x = 1", library) == 0.0
    assert reward("def gcd(a, b): return math.gcd(a, b)", library) == 1.0
    deep = {"tests": {"inputs": [[20000]], "outputs": [[0]], "fn_name": "f"}}
    assert reward("def f(n): return n and f(n - 1)", deep) == 1.0


class Budgeted:
    """A sandbox whose processes have one second each. A case takes its argument in seconds, and then passes."""

    def judge_calls(self, code: str, function: str, cases: Sequence[tuple[list[float], list[object]]], *, limits: Limits) -> Judgement:
        left, failures = 1.0, list[str | None]()
        for (seconds,), _ in cases:
            left -= seconds
            failures.append(None if left >= 0 else "not ended in time")
        return Judgement(failures, left < 0, decided=failures.count(None))


@pytest.mark.parametrize(
    ("seconds", "partial", "passed", "timed_out"),
    [
        ([0.6, 0.6, 0.6], False, 1.0, False),
        ([0.3, 0.3, 0.3, 0.3], False, 1.0, False),
        ([0.0, 9.0, 0.0, 0.0], True, 0.75, True),
        ([0.0, 9.0, 0.0, 0.0], False, 0.25, True),
        ([9.0, 9.0], True, 0.0, True),
    ],
)
def test_each_case_may_use_the_whole_limit(seconds: list[float], partial: bool, passed: float, timed_out: bool) -> None:
    calls = Calls("f", [([each], [0]) for each in seconds])
    assert _run_calls(cast("Sandbox", Budgeted()), "", calls, Limits(), partial) == (passed, timed_out)


def test_only_the_hung_case_fails() -> None:
    hangs = {"inputs": [[0], [1], [0]], "outputs": [[0], [1], [0]], "fn_name": "f"}
    problem = Problem("rows.jsonl:1", "", "", fields={"tests": hangs})
    code = "def f(n):\n    while n: pass\n    return n"
    assert score(code, problem, SAMPLE, timeout_s=1.0, partial=True) == {"reward": 2 / 3, "passed": 2 / 3, "timed_out": 1.0}


@pytest.mark.parametrize(
    ("printed", "expected", "decimals", "floats"),
    [
        ("1 2\n3\n", " 1  2 \n3", True, True),
        ("1.50", "1.5", True, True),
        ("Case 1: 1.0", "Case 1: 1.00", True, True),
        ("0.3333333", "0.333333", False, True),
        ("1e-9", "0.0", False, True),
        ("1.0", "1", True, True),
        ("100001", "100000", False, False),
        ("1.1", "1.0", False, False),
        ("1\n2", "1 2", False, False),
        ("2 1", "1 2", False, False),
        ("1", "1\n2", False, False),
        ("nan", "nan", True, True),
        ("inf", "1e999", False, False),
        ("1_0", "10", False, False),
    ],
)
def test_outputs_are_compared_as_the_benchmarks_do(printed: str, expected: str, decimals: bool, floats: bool) -> None:
    assert (same_decimals(printed, expected), same_floats(printed, expected)) == (decimals, floats)
    listed = {"tests": [{"input": "", "output": expected, "testtype": "stdin"}]}
    assert reward(f"print({printed!r})", listed) == float(decimals)
    assert reward(f"print({printed!r})", {"tests": {"inputs": [""], "outputs": [expected]}}) == float(floats)


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (TWICE, "functional cases need the name of the function in metadata.func_name, fn_name, entry_point or starter_code"),
        ([{"input": "x", "output": "1", "testtype": "functional", "fn_name": "f"}], "input of a functional case is not JSON: 'x'"),
        ([*NAMED, {"input": "1", "output": "1", "testtype": "stdin"}], "some cases are functional and others are not"),
        (base64.b64encode(zlib.compress(pickle.dumps(print))).decode(), "packed tests cannot be read: builtins.print in packed tests"),
        (base64.b64encode(zlib.compress(b"x")).decode(), "packed tests cannot be read"),
    ],
)
def test_invalid_rows_are_an_error_with_the_reason(tests: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"^rows.jsonl:1: column tests: {message}"):
        reward("x = 1", {"tests": tests})
