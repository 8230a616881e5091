"""Runs commands in this process, and returns their output and exit code."""

from __future__ import annotations

import os
from typing import Any

import pytest

from mtpctl.cli.app import main


class CommandResult:
    """The output and exit code of a command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


def keep_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore `CUDA_VISIBLE_DEVICES` after the test: `convert-hf` hides all GPUs from its process, which is that of the tests here."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "all")  # records that it was absent
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


@pytest.fixture
def mtpctl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    keep_visible_devices(monkeypatch)

    def call(*arguments: str) -> CommandResult:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        printed = capsys.readouterr()
        return CommandResult(int(ended.value.code or 0), printed.out, printed.err)

    return call
