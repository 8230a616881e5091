"""The installed wheel works outside of the repository, and contains its recipes and templates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEMPLATES = ROOT / "mtpctl" / "templates"
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
PROGRAM = "import mtpctl, sys; print(mtpctl.__file__, file=sys.stderr); from mtpctl.cli.app import main; main()"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds, as an installer unpacks it."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def mtpctl(site: Path, elsewhere: Path, *arguments: str) -> str:
    command = [sys.executable, "-P", "-c", PROGRAM, *arguments]
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0] == str(site / "mtpctl" / "__init__.py")
    return done.stdout


def test_wheel_contains_the_recipes(site: Path, tmp_path: Path) -> None:
    rows = json.loads(mtpctl(site, tmp_path, "recipe", "ls", "--json"))
    packed = site / "mtpctl" / "recipes"
    assert {Path(row["path"]).relative_to(packed) for row in rows} == {path.relative_to(ROOT / "recipes") for path in RECIPES}


def test_recipe_in_the_wheel_runs_by_name(site: Path, tmp_path: Path) -> None:
    arguments = ["train", "mimo7b_mtp", "--overlay", "h200x2", "--overlay", "toy", "--dry-run", "--set", "cluster.num_cpus=8"]
    assert "rollout" in mtpctl(site, tmp_path, *arguments)


def test_wheel_contains_the_templates(site: Path, tmp_path: Path) -> None:
    packed = site / "mtpctl" / "templates" / "reasoning_gym"
    files = {path.name for path in (TEMPLATES / "reasoning_gym").iterdir() if path.is_file()}
    assert {path.name for path in packed.iterdir() if path.is_file()} == files
    # That one needs a model.
    for template in (path.name for path in TEMPLATES.iterdir() if path.is_dir() and path.name not in ("reasoning_gym", "__pycache__")):
        assert mtpctl(site, tmp_path, "init", template, "--template", template).endswith(
            f"next: mtpctl recipe validate {template}/recipe.yaml\n"
        )
