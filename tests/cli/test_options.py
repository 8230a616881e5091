"""With `--json`, stdout contains only the JSON, whatever else is printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, os, subprocess, sys
import typer
from mtpctl.cli.options import Json, print_result

app = typer.Typer()
early = sys.stdout

@app.command()
def loud(as_json: Json = False) -> None:
    print("a library")
    os.system("echo a child")
    os.write(1, b"native code\\n")
    ctypes.CDLL(None).printf(b"native code that buffers\\n")
    early.write("a library that took stdout before\\n")
    print_result('{"answer": 1}')

app(sys.argv[1:])
"""


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    # What is buffered has to come out in the right place as well.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)


NOISE = ["a child", "a library", "a library that took stdout before", "native code", "native code that buffers"]


def test_other_output_goes_to_stderr_with_json() -> None:
    done = ran("--json")
    assert json.loads(done.stdout) == {"answer": 1}
    assert sorted(done.stderr.splitlines()) == NOISE


def test_output_is_not_redirected_without_json() -> None:
    done = ran()
    assert sorted(done.stdout.splitlines()) == [*NOISE, '{"answer": 1}']
    assert done.stderr == ""


def test_stdout_is_restored(capfd: pytest.CaptureFixture[str]) -> None:
    from mtpctl.cli.app import main

    with pytest.raises(SystemExit):
        main(["recipe", "validate", "tiny_mtp", "--json"])
    assert json.loads(capfd.readouterr().out)["ok"]
    subprocess.run(["echo", "later"], check=True)
    assert capfd.readouterr().out == "later\n"
