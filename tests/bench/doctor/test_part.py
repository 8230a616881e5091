"""Parts run in processes of their own: what comes back from one that fails, crashes or hangs."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from mtpctl.bench.doctor import part
from mtpctl.errors import EnvironmentMissing, RuntimeFailure
from tests.processes import runs

MODULE = """
import os, subprocess, sys, time
from mtpctl.errors import EnvironmentMissing

def well(folder):
    print("chatter")
    return {"found": 3}

def missing(folder):
    raise EnvironmentMissing("torch: is not installed")

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
from mtpctl.bench.doctor import part
part.PARTS = dict.fromkeys(["well", "missing", "crashes", "dies", "hangs"], "made_up")
import made_up
sys.modules["mtpctl.bench.doctor.made_up"] = made_up
part.main(sys.argv[-2], Path(sys.argv[-1]))
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Runs a part of the module above, by the program that stands in for `python -m mtpctl.bench.doctor.part`."""
    (tmp_path / "made_up.py").write_text(MODULE)
    interpreter = tmp_path / "python"
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(folder=str(tmp_path)))
    import sys

    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
    interpreter.chmod(0o755)
    monkeypatch.setattr(part.sys, "executable", str(interpreter))
    return lambda name, seconds=60.0: asyncio.run(part.run_part(name, tmp_path, seconds))


def test_a_part_gives_its_findings_and_its_chatter_goes_to_a_log(run: object, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("well") == {"found": 3}  # type: ignore[operator]
    assert (tmp_path / "well.log").read_text() == "chatter\n"
    assert capfd.readouterr().out == ""


def test_our_own_errors_come_back_as_they_were(run: object) -> None:
    with pytest.raises(EnvironmentMissing, match=r"^torch: is not installed$"):
        run("missing")  # type: ignore[operator]


@pytest.mark.parametrize(
    ("name", "told"), [("crashes", "crashes: ended with code 1: TypeError: no such thing"), ("dies", "dies: ended with code -6")]
)
def test_a_crash_is_told_in_one_line(run: object, name: str, told: str) -> None:
    with pytest.raises(RuntimeFailure, match=told) as raised:
        run(name)  # type: ignore[operator]
    assert "\n" not in str(raised.value)


def test_a_part_that_hangs_is_ended_with_all_that_it_started(run: object, tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailure, match="hangs: no answer within 5 s"):
        run("hangs", 5.0)  # type: ignore[operator]
    child = int((tmp_path / "child").read_text())
    end = time.monotonic() + 10
    while runs(child):
        assert time.monotonic() < end
        time.sleep(0.1)
