"""A converted checkpoint is restored and saved under other layouts, and converted back to an equal folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtpctl.convert.hf_folder import HfFolder
from tests.fakes.convert_found import fp8, packed, prefixed
from tests.fakes.convert_models import FAMILIES, assert_same_tensors, converted, model
from tests.fakes.convert_ranks import run, saved_again
from tests.fakes.tiny import mimo

LAYOUTS = ["mimo:tp=2", "mimo:pp=2", "odd:tp=2", "qwen3-moe:dp=2,ep=2"]
EVEN = {"nemotron-h": {"n_groups": 2}}
"""Sizes that two ranks can share, of toys with odd ones."""
PUBLISHED = ["fp8:tp=2:folder", "fp8:pp=2:folder", "packed:dp=2,ep=2:folder", "prefixed:tp=2:folder"]


def convert_models(root: Path, cases: list[str]) -> None:
    for name in sorted({case.split(":")[0] for case in cases}):
        (root / name).mkdir()
        if name == "odd":
            mimo(root / name / "hf", vocab_size=61)
        else:
            model(name, root / name / "hf", **EVEN.get(name, {}))
        converted(root / name / "hf", root / name / "checkpoint")


def assert_restored(root: Path, cases: list[str]) -> None:
    """The checkpoints that the ranks saved give the folders back."""
    for case in cases:
        home, saved = root / case.split(":")[0], saved_again(root, case)
        converted(saved, Path(f"{saved}-back"), model=home / "hf")
        assert_same_tensors(Path(f"{saved}-back"), home / "hf")


def under_ranks(root: Path, cases: list[str]) -> None:
    assert {case: run(root, case) for case in cases} == dict.fromkeys(cases, "ok")


@pytest.fixture(scope="module")
def saved_by_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that the ranks of `LAYOUTS` and `PUBLISHED` have loaded and saved."""
    root = tmp_path_factory.mktemp("ranks")
    convert_models(root, LAYOUTS)
    for create in (fp8, packed, prefixed):
        home = root / create.__name__
        home.mkdir()
        create(home / "hf")
        converted(home / "hf", home / "checkpoint")
        converted(home / "checkpoint", home / "plain", dtype="bf16")
    under_ranks(root, LAYOUTS + PUBLISHED)
    return root


def test_default_layouts_restore_and_save(saved_by_ranks: Path) -> None:
    assert_restored(saved_by_ranks, LAYOUTS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_restores_and_saves_under_other_layouts(tmp_path: Path, name: str) -> None:
    cases = [f"{name}:tp=2", f"{name}:pp=2", f"{name}:tp=2,pp=2"]
    (tmp_path / "probe").mkdir()
    model(name, tmp_path / "probe" / "hf")
    if HfFolder.open(tmp_path / "probe" / "hf").shape.moe is not None:
        cases.append(f"{name}:dp=2,ep=2")
    convert_models(tmp_path, cases)
    under_ranks(tmp_path, cases)
    assert_restored(tmp_path, cases)


def test_published_folder_variants_are_converted(saved_by_ranks: Path) -> None:
    """Folders that several ranks load equal the model that one process converts."""
    for case in PUBLISHED:
        home, saved = saved_by_ranks / case.split(":")[0], saved_again(saved_by_ranks, case)
        converted(saved, Path(f"{saved}-back"), model=home / "hf", dtype="bf16")
        assert_same_tensors(Path(f"{saved}-back"), home / "plain")
