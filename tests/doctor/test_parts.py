"""Parts of the doctor: results and errors of their processes, and the self-check with real engines."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from mtpctl.doctor import parts
from mtpctl.doctor.parts import Agreement, compare, run_part
from mtpctl.errors import PrerequisiteMissing, RuntimeFailure, ThresholdMissed
from mtpctl.samples import Sample, Speculation
from tests.fakes.processes import runs

MODULE = """
import os, subprocess, sys, time
from mtpctl.errors import PrerequisiteMissing

def well(folder):
    print("chatter")
    return {"found": 3}

def missing(folder):
    raise PrerequisiteMissing("torch: is not installed")

def crashes(folder):
    print("before", file=sys.stderr)
    raise TypeError("no such thing")

def dies(folder):
    os.abort()

def hangs(folder):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (folder / "child").write_text(str(child.pid))
    time.sleep(600)
"""
PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, {folder!r})
import fake_parts
from mtpctl.doctor import parts
parts.PARTS = vars(fake_parts)
parts.main(sys.argv[-2], Path(sys.argv[-1]))
"""


Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a part of the module above, by a program that replaces `python -m mtpctl.doctor.parts`."""
    (tmp_path / "fake_parts.py").write_text(MODULE)
    interpreter = tmp_path / "python"
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(folder=str(tmp_path)))
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
    interpreter.chmod(0o755)
    monkeypatch.setattr(parts.sys, "executable", str(interpreter))
    return lambda name, seconds=60.0: asyncio.run(run_part(name, tmp_path, seconds))


def test_result_is_returned_and_output_goes_to_the_log(run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("well") == {"found": 3}
    assert (tmp_path / "well.log").read_text() == "chatter\n"
    assert capfd.readouterr().out == ""


def test_errors_of_the_project_keep_their_type(run: Run) -> None:
    with pytest.raises(PrerequisiteMissing, match=r"^torch: is not installed$"):
        run("missing")


@pytest.mark.parametrize(
    ("name", "message"), [("crashes", "crashes: ended with code 1: TypeError: no such thing"), ("dies", "dies: ended with code -6")]
)
def test_crash_is_reported_in_one_line(run: Run, name: str, message: str) -> None:
    with pytest.raises(RuntimeFailure, match=message) as raised:
        run(name)
    assert "\n" not in str(raised.value)


def test_part_that_hangs_is_killed_with_its_children(run: Run, tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailure, match="hangs: no answer within 5 s"):
        run("hangs", 5.0)
    child = int((tmp_path / "child").read_text())
    end = time.monotonic() + 10
    while runs(child):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_log_probs_are_compared_token_by_token() -> None:
    first, second = Sample("a", "g", [1]), Sample("b", "g", [1])
    first.append([3, 4], [-1.0, -2.0], 0)
    second.append([5], [-3.0], 0)
    second.speculation = Speculation(drafted=4, accepted=1)
    agreement = compare([first, second], [[-1.0, -2.0002], [-2.9995]], "fp32")
    assert (agreement.responses, agreement.tokens, agreement.drafted, agreement.accepted) == (2, 3, 4, 1)
    assert agreement.mean_abs == pytest.approx(7e-4 / 3) and agreement.max_abs == pytest.approx(5e-4)
    with pytest.raises(ThresholdMissed, match="self-check"):
        agreement.check()
    compare([second], [[-3.00009]], "fp32").check()


def test_response_of_another_length_cannot_be_compared() -> None:
    sample = Sample("a", "g", [1])
    sample.append([3, 4], [-1.0, -2.0], 0)
    with pytest.raises(ValueError, match="shorter"):
        compare([sample], [[-1.0]], "fp32")


@pytest.mark.slow
def test_vllm_and_the_trainer_agree_on_this_machine(tmp_path: Path) -> None:
    sampled = asyncio.run(run_part("sample", tmp_path, 200))
    stored = json.loads((tmp_path / "samples.json").read_text())["samples"]
    assert {each["finish_reason"] for each in stored} == {"length"} and len(stored) == 64
    agreement = Agreement(**asyncio.run(run_part("score", tmp_path, 200)))
    assert agreement.tokens == sampled["tokens"] > 1500
    assert agreement.drafted > 1000 and agreement.accepted > 30
    assert agreement.mean_abs < 1e-5 if agreement.precision == "fp32" else agreement.mean_abs < agreement.bound
    agreement.check()


@pytest.mark.parametrize("failure", ["raises", "nan"])
def test_kernel_that_fails_is_a_result_also_if_auto_selects_it(failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mtpctl.kernels import logprob

    upstream = logprob.linear_logprob

    def fail(hidden: Any, weight: Any, labels: Any, *, implementation: str = "auto") -> Any:
        if implementation == "reference":
            return upstream(hidden, weight, labels, implementation=implementation)
        if failure == "raises":
            raise RuntimeError("cannot compile")
        out = upstream(hidden, weight, labels, implementation="reference")
        return out._replace(logprob=out.logprob * float("nan"))

    monkeypatch.setattr(logprob, "linear_logprob", fail)
    result = cast(Any, parts.kernels(tmp_path))
    reasons = {row["name"]: row.get("reason") for row in result["implementations"]}
    expected = "RuntimeError: cannot compile" if failure == "raises" else "differs from the reference by nan"
    assert reasons.pop("reference") is None and all(reason.startswith(expected) for reason in reasons.values())
