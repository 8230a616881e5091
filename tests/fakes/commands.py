"""Runs commands in this process, and returns their output and exit code."""

from __future__ import annotations

from typing import Any

import pytest

from mtpctl.cli.app import main


class CommandResult:
    """The output and exit code of a command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def mtpctl(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: str) -> CommandResult:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        printed = capsys.readouterr()
        return CommandResult(int(ended.value.code or 0), printed.out, printed.err)

    return call
