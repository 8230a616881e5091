"""Programs, sessions, the reward and the environment."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Mapping

import pytest

from mtpctl.data.problems import Problem
from mtpctl.environments.built_in import Python, shorten_middle
from mtpctl.errors import PrerequisiteMissing, UserError
from mtpctl.samples import Sample
from mtpctl.sandbox.reward import same_output, score
from mtpctl.sandbox.sandbox import Sandbox, describe_layers, require
from mtpctl.sandbox.session import Limits

SAMPLE = Sample("p", "g", [1])


def problem(answer: str = "", **fields: object) -> Problem:
    return Problem("rows.jsonl:1", "", answer, fields=fields)


@pytest.mark.parametrize(
    ("code", "stdin", "stdout", "code_of_exit"),
    [
        ("print(int(input()) * 2)", "21\n", "42\n", 0),
        ("import sys\nprint(sys.stdin.read().upper())", "ü" * 3, "ÜÜÜ\n", 0),
        ("print(len(open(0).read()))", "x" * 300_000, "300000\n", 0),
        ("import sys\nprint(1)\nsys.exit(3)", "", "1\n", 3),
        ("raise SystemExit('message')", "", "", 1),
        ("1/0", "", "", 1),
        ("if __name__ == '__main__': print('main')", "", "main\n", 0),
        ("import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()", "", "late\n", 0),
        ("import atexit\natexit.register(print, 'end')", "", "end\n", 0),
        ("import asyncio\nasync def f(): await asyncio.sleep(0.01); return 5\nprint(asyncio.run(f()))", "", "5\n", 0),
        ("from concurrent.futures import ThreadPoolExecutor as T\nprint(list(T(2).map(abs, [-1, 2])))", "", "[1, 2]\n", 0),
        ("import random, decimal, statistics, zoneinfo\nprint(decimal.Decimal(1) / 4)", "", "0.25\n", 0),
    ],
)
def test_program_runs_as_outside_the_sandbox(sandbox: Sandbox, code: str, stdin: str, stdout: str, code_of_exit: int) -> None:
    result = sandbox.run(code, stdin=stdin)
    assert (result.stdout, result.exit) == (stdout, code_of_exit), result


def test_traceback_of_a_program_names_its_line(best: Sandbox) -> None:
    stderr = best.run("x = 1\ndef f(): return x / 0\nf()").stderr
    assert (
        'File "answer.py", line 2, in f' in stderr
        and stderr.endswith("ZeroDivisionError: division by zero\n")
        and "inside.py" not in stderr
    )


def test_runs_may_be_started_by_many_threads(best: Sandbox) -> None:
    outputs: dict[int, str] = {}

    def ask(number: int) -> None:
        outputs[number] = best.run(f"print({number})").stdout

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == {number: f"{number}\n" for number in range(24)}


def test_session_keeps_state_and_prints_the_last_expression(sandbox: Sandbox) -> None:
    session = sandbox.session()
    outputs = [
        session.run(code).text for code in ("x = [1]", "x.append(2); x", "print(sum(x))\nNone", "def f():\n    return x\nf()", "x +")
    ]
    assert outputs[:4] == ["", "[1, 2]\n", "3\n", "[1, 2]\n"] and "SyntaxError" in outputs[4]
    assert session.run("import time\nlen(x)").text == "2\n"
    session.close()


def test_cell_at_its_limit_is_interrupted_and_state_is_kept(sandbox: Sandbox) -> None:
    session = sandbox.session(Limits(cpu_s=60, wall_s=1.0))
    session.run("x = 5")
    hung = session.run("while True: pass")
    assert hung.timed_out and not hung.ended and "KeyboardInterrupt" in hung.text
    flooded = session.run("while True: print('x' * 1000)")
    assert flooded.too_much_output and not flooded.ended
    assert session.run("x").text == "5\n"
    session.close()


def test_cell_that_ignores_the_interrupt_ends_the_session_and_the_next_starts_another(sandbox: Sandbox, best: Sandbox) -> None:
    """Busy with one mechanism, asleep with the others."""
    session = sandbox.session(Limits(cpu_s=60, wall_s=1.0))
    session.run("x = 5")
    forever = "while True: pass" if sandbox.mechanism() == best.mechanism() else "import time\nwhile True: time.sleep(9)"
    deaf = session.run(f"import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n{forever}")
    assert deaf.timed_out and deaf.ended
    assert "NameError" in session.run("x").text
    assert session.run("import os\nos._exit(0)").ended
    session.close()


def test_closing_a_session_ends_the_running_cell(best: Sandbox) -> None:
    session = best.session(Limits(cpu_s=600, wall_s=600))
    session.run("1")
    thread = threading.Thread(target=session.run, args=("while True: pass",))
    thread.start()
    began = time.monotonic()
    session.close()
    thread.join(20)
    assert not thread.is_alive() and time.monotonic() - began < 20
    assert session.run("1").ended


def test_outputs_are_compared_line_by_line() -> None:
    assert same_output("1 \n2\n\n", "1\n2") and not same_output("1\n2", "1 2") and not same_output(" 1", "1")


DOUBLE = "def double(x): return 2 * x"


@pytest.mark.parametrize(
    ("response", "fields", "answer", "reward", "passed"),
    [
        (DOUBLE, {"tests": ["assert double(1) == 2", "assert double(3) == 6"]}, "", 1.0, 1.0),
        (DOUBLE, {"tests": ["assert double(1) == 2", "assert double(3) == 7"]}, "", 0.0, 0.5),
        (DOUBLE, {"tests": '["assert double(1) == 2"]'}, "", 1.0, 1.0),
        (DOUBLE, {"tests": "assert double(1) == 2\nassert double(2) == 4"}, "", 1.0, 1.0),
        (DOUBLE, {"tests": "def check(candidate):\n    assert candidate(2) == 4", "entry_point": "double"}, "", 1.0, 1.0),
        (DOUBLE, {"tests": "def check(candidate):\n    assert candidate(2) == 5", "entry_point": "double"}, "", 0.0, 0.0),
        ("print(2 * int(input()))", {"tests": [{"input": "2", "output": "4"}, {"input": "3", "output": "6\n"}]}, "", 1.0, 1.0),
        ("print(4)", {"tests": [{"input": "2", "output": "4"}, {"input": "3", "output": "6"}]}, "", 0.0, 0.5),
        ("print(2 * int(input()))", {"tests": '{"inputs": ["2"], "outputs": ["4"]}'}, "", 1.0, 1.0),
        ("print(6 * 7)", {}, "42", 1.0, 1.0),
        ("print(41)", {}, "42", 0.0, 0.0),
        ("print(42)\nraise SystemExit(1)", {}, "42", 0.0, 0.0),
    ],
)
def test_code_is_rewarded_by_its_tests(response: str, fields: Mapping[str, object], answer: str, reward: float, passed: float) -> None:
    result = score(response, problem(answer, **fields), SAMPLE)
    assert result == {"reward": reward, "passed": passed, "timed_out": 0.0}
    assert score(response, problem(answer, **fields), SAMPLE, partial=True)["reward"] == passed


def test_hung_answer_is_counted_as_timed_out() -> None:
    result = score("while True: pass", problem("1"), SAMPLE, timeout_s=0.2)
    assert result == {"reward": 0.0, "passed": 0.0, "timed_out": 1.0}


@pytest.mark.parametrize("tests", [[], [1, 2], {"inputs": ["1"]}, [{"input": "1"}], "assert (", {"inputs": [], "outputs": []}])
def test_invalid_tests_are_an_error_with_the_row(tests: object) -> None:
    with pytest.raises(ValueError, match=r"rows.jsonl:1: column cases: ."):
        score("x = 1", problem(cases=tests), SAMPLE, tests="cases")


def test_environment_keeps_a_session_for_each_response() -> None:
    async def talk() -> list[str]:
        first, second = Python(problem()), Python(timeout_s=1.0, max_chars=400)
        assert first.stop == ["</python>"]
        outputs = [
            await first.reply("so <python>x = 6</python>"),
            await first.reply("and <python>\n```python\nx * 7\n```\n</python>"),
            await second.reply("<python>x</python>"),
            await second.reply("<python>while True: pass</python>"),
            await second.reply("<python>exit()</python>"),
        ]
        first.close()
        second.close()
        return outputs

    outputs = asyncio.run(talk())
    assert outputs[:2] == ["<output>\n</output>\n", "<output>\n42\n</output>\n"]
    assert "NameError" in outputs[2]
    assert outputs[3].endswith("[timed out]\n</output>\n")
    assert outputs[4] == "<output>\n[the session ended, and its variables are gone]\n</output>\n"


def test_long_output_loses_its_middle() -> None:
    assert shorten_middle("a" * 10, 10) == "a" * 10
    assert shorten_middle("a" * 9 + "b" * 9, 8) == "aaaa\n[10 characters left out]\nbbbb"


def test_layers_are_described_in_one_line_each(sandbox: Sandbox) -> None:
    restrictions = describe_layers(sandbox)
    assert [layer.name for layer in restrictions] == ["network", "files", "processes", "limits"]
    assert all(layer.by and "\n" not in layer.by for layer in restrictions)


def test_code_runs_without_isolation_only_if_the_recipe_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(sandbox: Sandbox, mechanism: str) -> str:
        if mechanism != "none":
            return f"no {mechanism}"
        sandbox._control, other = socket.socketpair()
        other.close()
        sandbox._mechanism = "none"
        return ""

    monkeypatch.setattr(Sandbox, "_start_zygote", start)
    with pytest.raises(PrerequisiteMissing, match=r"^sandbox: the model's code .*\(namespaces: no .*; set reward.args.isolation: none"):
        require("reward.args")
    with pytest.raises(UserError, match=r"^rollout.environment_args.isolation: 'off' is neither required nor none$"):
        require("rollout.environment_args", "off")
    require("reward.args", "none")


def test_isolation_none_runs_code_with_the_callers_rights(tmp_path: object) -> None:
    with Sandbox(only="none") as bare:
        assert bare.run(f"import os; print(os.path.isdir({str(tmp_path)!r}))").stdout == "True\n"
        assert [layer.by is None for layer in describe_layers(bare)] == [True, True, True, False]
        assert bare.run("while True: pass", limits=Limits(cpu_s=9, wall_s=0.5)).timed_out
