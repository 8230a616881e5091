"""A converted checkpoint is restored and saved under other layouts, and converted back to an equal folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mtpctl.convert.hf_folder import HfFolder
from tests.environment import TREE, with_tree
from tests.fakes.convert_found import fp8, packed, prefixed
from tests.fakes.convert_models import FAMILIES, assert_same_tensors, converted, model
from tests.fakes.convert_ranks import saved_again
from tests.fakes.tiny import mimo


def through_ranks(root: Path, cases: list[str]) -> None:
    """Convert each model, load and save it under the layout of each case, and convert back."""
    for name in sorted({case.split(":")[0] for case in cases}):
        (root / name).mkdir()
        if name == "odd":
            mimo(root / name / "hf", vocab_size=61)
        else:
            model(name, root / name / "hf")
        converted(root / name / "hf", root / name / "checkpoint")
    under_ranks(root, cases)
    for case in cases:
        home, saved = root / case.split(":")[0], saved_again(root, case)
        converted(saved, Path(f"{saved}-back"), model=home / "hf")
        assert_same_tensors(Path(f"{saved}-back"), home / "hf")


def under_ranks(root: Path, cases: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.fakes.convert_ranks", str(root), *cases],
        cwd=TREE,
        env=with_tree(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_default_layouts_restore_and_save(tmp_path: Path) -> None:
    through_ranks(tmp_path, ["mimo:tp=2", "mimo:pp=2", "odd:tp=2", "qwen3-moe:dp=2,ep=2"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_restores_and_saves_under_other_layouts(tmp_path: Path, name: str) -> None:
    cases = [f"{name}:tp=2", f"{name}:pp=2", f"{name}:tp=2,pp=2"]
    (tmp_path / "probe").mkdir()
    model(name, tmp_path / "probe" / "hf")
    if HfFolder.open(tmp_path / "probe" / "hf").shape.moe is not None:
        cases.append(f"{name}:dp=2,ep=2")
    through_ranks(tmp_path, cases)


def test_published_folder_variants_are_converted(tmp_path: Path) -> None:
    """Folders that several ranks load equal the model that one process converts."""
    cases = ["fp8:tp=2:folder", "fp8:pp=2:folder", "packed:dp=2,ep=2:folder", "prefixed:tp=2:folder"]
    for give in (fp8, packed, prefixed):
        home = tmp_path / give.__name__
        home.mkdir()
        give(home / "hf")
        converted(home / "hf", home / "checkpoint")
        converted(home / "checkpoint", home / "plain", dtype="bf16")
    under_ranks(tmp_path, cases)
    for case in cases:
        home, saved = tmp_path / case.split(":")[0], saved_again(tmp_path, case)
        converted(saved, Path(f"{saved}-back"), model=home / "hf", dtype="bf16")
        assert_same_tensors(Path(f"{saved}-back"), home / "plain")
