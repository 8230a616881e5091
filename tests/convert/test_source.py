"""Which model a checkpoint is of."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtpctl.convert.hf_folder import create_hf_folder
from mtpctl.convert.source import reference_of
from mtpctl.errors import UserError
from mtpctl.recipe.loading import dump_resolved, load_recipe
from tests.fakes.tiny import mimo


@pytest.mark.parametrize("sets", [["model.config.rope_theta=20000"], ["model.config=null", "model.path=org/a-model", "model.init=random"]])
def test_model_of_a_run_with_random_weights_is_in_its_directory(tmp_path: Path, sets: list[str]) -> None:
    recipe = load_recipe("tiny_mtp", sets=[*sets, f"run_dir={tmp_path / 'run'}"]).recipe
    create_hf_folder(load_recipe("tiny_mtp").recipe.model.config or {}, tmp_path / "run" / "model", 0)
    (tmp_path / "run" / "recipe.resolved.yaml").write_text(dump_resolved(recipe))
    assert reference_of(tmp_path / "run" / "checkpoints" / "rl-000001", None).folder.path == tmp_path / "run" / "model"


def test_model_of_a_run_that_loaded_weights_is_the_loaded_folder(tmp_path: Path) -> None:
    loaded = mimo(tmp_path / "loaded").path
    recipe = load_recipe("tiny_mtp", sets=["model.config=null", f"model.path={loaded}", "model.init=weights"]).recipe
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "recipe.resolved.yaml").write_text(dump_resolved(recipe))
    assert reference_of(tmp_path / "run" / "checkpoints" / "rl-000001", None).folder.path == loaded


def test_checkpoint_without_a_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name the model's folder with --model"):
        reference_of(tmp_path / "checkpoints" / "rl-000001", None)
