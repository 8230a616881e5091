"""Every benchmark script parses its options, and every command of the guides that runs one exists."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py") if path.name != "harness.py")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = sorted(
    {
        " ".join(command.replace("\\\n", " ").split())
        for page in PAGES
        for command in re.findall(r"python benchmarks/((?:[^\n`\\]|\\\n)+)", page.read_text())
    }
)


def help_of(script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    monkeypatch.syspath_prepend((ROOT / "benchmarks" / script).parent)  # as for a script that is run
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(ROOT / "benchmarks" / script), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_has_the_docstring(script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"python benchmarks/{script}" in help_of(script, monkeypatch, capsys)


def test_guides_run_scripts() -> None:
    assert len(COMMANDS) > 10


@pytest.mark.parametrize("command", COMMANDS)
def test_command_of_a_guide_exists(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script, *arguments = shlex.split(command, comments=True)
    text = help_of(script, monkeypatch, capsys)
    assert {argument for argument in arguments if argument.startswith("--")} <= set(re.findall(r"--[\w-]+", text))
