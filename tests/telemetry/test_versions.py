"""What made a run: packages, and the cards that it could see."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mtpctl.telemetry import versions
from mtpctl.telemetry.versions import collect_versions, visible_cards


@pytest.fixture
def two_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The driver's tool of a host with two cards."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-aa, NVIDIA H200'\necho '1, GPU-bb, NVIDIA H100 80GB HBM3'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tool


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["NVIDIA H200", "NVIDIA H100 80GB HBM3"]),
        ("1", ["NVIDIA H100 80GB HBM3"]),
        ("GPU-bb,GPU-aa", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]),
        ("", []),
    ],
)
def test_cards_are_those_that_the_process_may_use(
    two_cards: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, names: list[str]
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_cards() == names
    assert collect_versions()["machine"]["cards"] == names


def test_a_tool_that_does_not_answer_is_told_of(two_cards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_cards.write_text("#!/bin/sh\nexec sleep 5\n")
    monkeypatch.setattr(versions, "NVIDIA_SMI_S", 0.1)
    assert visible_cards() == ["unknown card (nvidia-smi did not answer within 0.1 s)"]
