"""Output and exit codes of `mtpctl doctor`. The checks are tested in tests/doctor."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from mtpctl.cli.app import main
from mtpctl.doctor.checks import Check, Diagnosis, Finding
from mtpctl.errors import PrerequisiteMissing

WELL = [Check("python", Finding("ok", "3.12 [as wanted]"), 0.0), Check("gpus", Finding("absent", "none"), 0.0)]
SKIPPED = Check("self-check", Finding("skipped", "skipped by --quick"), 0.0)
BROKEN = Check("packages", Finding("failed", "torch: is not installed", [1], PrerequisiteMissing("torch: is not installed")), 0.1)

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    def call(checks: list[Check], *arguments: str) -> tuple[int, str, str]:
        def examine(*, quick: bool, on_check: Any) -> Diagnosis:
            assert quick == ("--quick" in arguments)
            for check in checks:
                on_check(check)
            return Diagnosis(checks, 2.5)

        monkeypatch.setattr("mtpctl.doctor.checks.examine", examine)
        with pytest.raises(SystemExit) as ended:
            main(["doctor", *arguments])
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return call


def test_machine_without_failures_is_all_well(doctor: Call) -> None:
    code, out, _ = doctor(WELL)
    assert code == 0
    assert "✓  python  3.12 [as wanted]" in out and "–  gpus" in out
    assert out.endswith("all well, after 2.5 s\n")


def test_skipped_check_is_named_in_the_verdict(doctor: Call) -> None:
    assert doctor([*WELL, SKIPPED], "--quick")[1].endswith("all well, without the self-check, after 2.5 s\n")


def test_missing_package_gives_exit_code_3_with_one_line_after_the_table(doctor: Call) -> None:
    code, out, err = doctor([*WELL, BROKEN])
    assert code == 3 and err == "error: torch: is not installed\n"
    assert "✗  packages" in out and "not fit to run" in out


def test_json_has_the_whole_diagnosis_of_a_failure(doctor: Call) -> None:
    code, out, err = doctor([*WELL, BROKEN], "--json")
    document = json.loads(out)
    assert (code, document["exit_code"]) == (3, 3) and err.endswith("error: torch: is not installed\n")
    assert document["checks"]["packages"] == {
        "state": "failed",
        "finding": "torch: is not installed",
        "data": [1],
        "error": "torch: is not installed",
        "seconds": 0.1,
    }


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    return int(ended.value.code or 0)


def test_supported_model_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", "GLM-4.7") == 0
    out = capsys.readouterr().out
    assert "Glm4MoeForCausalLM (glm4-moe), 356.79 B parameters" in " ".join(out.split())
    assert "\nsupported, after " in out


def test_unsupported_model_gives_exit_code_2_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", "openai/gpt-oss-20b") == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("error: openai/gpt-oss-20b: gpt-oss is not supported: the trainer has no attention sinks")
