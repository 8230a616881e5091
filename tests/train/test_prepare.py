"""Where the model that a run begins with comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtpctl.recipe import Recipe, UserError, load_recipe
from mtpctl.train.prepare import model_of, prepare
from tests.train.test_offline import SMALL


def recipe(*sets: str) -> Recipe:
    return load_recipe("tiny_mtp", sets=[*SMALL, *sets]).recipe


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_of(recipe("seed=1"), tmp_path / "other").path


def test_the_weights_of_a_folder_are_loaded_where_they_lie(folder: Path, tmp_path: Path) -> None:
    named = recipe("model.config=null", f"model.path={folder}", "model.init=weights")
    assert model_of(named, tmp_path / "run").path == folder
    assert not (tmp_path / "run").exists()


def test_or_drawn_from_the_seed_into_the_run(folder: Path, tmp_path: Path) -> None:
    drawn = recipe("model.config=null", f"model.path={folder}", "model.init=random", "seed=2")
    made = model_of(drawn, tmp_path / "run")
    assert made.path == tmp_path / "run" / "model"
    assert weights(made.path) == weights(model_of(recipe("seed=2"), tmp_path / "same").path) != weights(folder)


def test_which_needs_no_weights_there(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    drawn = recipe("model.config=null", f"model.path={folder}", "model.init=random")
    assert prepare(drawn, tmp_path / "run").model.path == tmp_path / "run" / "model"


def test_problems_are_read_before_a_model_is_made(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt":\n')
    with pytest.raises(UserError, match=r"bad\.jsonl:2: not JSON"):
        prepare(recipe("data.task=null", f"data.path={bad}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
