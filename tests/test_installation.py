"""The lists in constraints/ match pyproject.toml, pip installs from them, and environments of other systems ignore them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def constraints(extra: str) -> list[str]:
    return (ROOT / "constraints" / f"{extra}.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_list_has_every_requirement_in_a_version_that_satisfies_it(extra: str) -> None:
    versions = dict(line.split("==") for line in constraints(extra))
    for text in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra]]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(versions[normal(requirement.name)]), f"{text}: run scripts/constraints"


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_constraints_list_only_packages_and_versions(extra: str) -> None:
    for line in constraints(extra):
        assert re.fullmatch(r"[a-z0-9-]+==[A-Za-z0-9.]+", line), line


def run(*command: str | Path, folder: Path, seconds: float) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VIRTUAL_ENV", "PYTHON"))}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("script", ["scripts/sglang_environment.sh", "benchmarks/peers/verl_bundle.sh", "benchmarks/peers/trl_bundle.sh"])
def test_environments_of_other_systems_ignore_the_versions_of_this_project(script: str) -> None:
    """In the checkout, uv would apply the overrides of `tool.uv`, such as this project's torch."""
    installs = [line for line in (ROOT / script).read_text(encoding="utf-8").splitlines() if " pip install " in line]
    assert installs
    assert all("--no-config" in line for line in installs)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_plain_pip_installs_a_working_trainer(tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "env", folder=tmp_path, seconds=120)
    pip = (tmp_path / "env" / "bin" / "pip", "install", "--quiet", "--no-cache-dir", "--no-deps")
    run(*pip, "-r", ROOT / "constraints" / "cpu.txt", folder=tmp_path, seconds=1200)
    run(*pip, ROOT, folder=tmp_path, seconds=300)
    mtpctl = tmp_path / "env" / "bin" / "mtpctl"
    assert "torch 2.13.0" in run(mtpctl, "--version", folder=tmp_path, seconds=60)
    run(mtpctl, "train", "tiny_mtp", "--dry-run", folder=tmp_path, seconds=120)
    small = ["train.stages=[rl]", "train.rl.steps=2", "train.rl.dynamic_sampling=false", "data.task.eval_size=8"]
    run(mtpctl, "train", "tiny_mtp", "--plain", *(word for key in small for word in ("--set", key)), folder=tmp_path, seconds=300)
    assert "done, rl step 2 of 2" in run(mtpctl, "status", "runs/tiny_mtp", folder=tmp_path, seconds=60)
