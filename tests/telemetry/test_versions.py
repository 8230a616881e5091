"""Recorded versions of packages and visible GPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from mtpctl.telemetry import versions
from mtpctl.telemetry.versions import collect_versions, visible_gpus


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The driver's tool of a host with two GPUs."""
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
        ("1, 0", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]),
        ("GPU-bb,GPU-aa", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]),
        ("", []),
    ],
)
def test_only_visible_gpus_are_listed(two_gpus: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, names: list[str]) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == names
    assert collect_versions()["machine"]["cards"] == names


def test_hanging_nvidia_smi_is_reported(two_gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_gpus.write_text("#!/bin/sh\nexec sleep 5\n")
    monkeypatch.setattr(versions, "NVIDIA_SMI_S", 0.1)
    assert visible_gpus() == ["unknown GPU (nvidia-smi did not answer within 0.1 s)"]


def test_unkillable_nvidia_smi_is_not_waited_for(two_gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like a process that hangs in a driver call."""
    pids: list[int] = []
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: pids.append(process.pid))
    two_gpus.write_text("#!/bin/sh\nexec sleep 20\n")
    monkeypatch.setattr(versions, "NVIDIA_SMI_S", 0.1)
    began = time.monotonic()
    try:
        assert visible_gpus() == ["unknown GPU (nvidia-smi did not answer within 0.1 s)"]
        assert time.monotonic() - began < 5
    finally:
        [pid] = pids
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("tool", "why"),
    [
        (None, "there is no nvidia-smi"),
        ("", "nvidia-smi does not run: Exec format error"),  # as a container keeps it that ran with GPUs once
        ("#!/bin/sh\necho 'has failed: no driver'; exit 9\n", "nvidia-smi listed none, exit code 9"),
    ],
)
def test_failing_nvidia_smi_is_reported_as_unknown_gpu(
    two_gpus: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tool: str | None, why: str
) -> None:
    if tool is None:
        two_gpus.unlink()
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        two_gpus.write_text(tool)
    driver = tmp_path / "version"
    monkeypatch.setattr(versions, "DRIVER", driver)
    assert visible_gpus() == [], "without a driver there is none"
    driver.touch()
    assert visible_gpus() == [f"unknown GPU ({why})"]
