"""A preset sets the values of a paper as defaults, which explicit values override. They are shown with their origin."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from mtpctl.recipe.loading import dump_resolved, load_recipe
from mtpctl.recipe.rl import PRESETS, RlConfig


def test_every_preset_can_be_named_and_every_name_is_a_preset() -> None:
    named = {name for part in get_args(RlConfig.model_fields["preset"].annotation) for name in get_args(part)}
    assert named == PRESETS.keys()


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_valid_and_match_papers(preset: str) -> None:
    config = RlConfig.model_validate({"preset": preset})
    for name in ("loss", "advantage", "aggregate", "dynamic_sampling"):
        assert getattr(config, name) == PRESETS[preset][name]
    assert {"steps", "prompts_per_step", "group_size", "optimizer"}.isdisjoint(PRESETS[preset])


def test_dapo_is_clip_higher_token_mean_dynamic_sampling_and_the_overlong_penalty() -> None:
    config = RlConfig(preset="dapo")
    assert (config.loss, config.clip_low, config.clip_high, config.aggregate) == ("ppo", 0.2, 0.28, "token")
    assert config.dynamic_sampling and config.overlong.enabled and config.kl_coef == 0


def test_without_a_preset_the_defaults_are_the_sections_own() -> None:
    assert RlConfig(preset=None) == RlConfig()


def test_set_keys_override_preset_in_nested_mappings() -> None:
    config = RlConfig.model_validate({"preset": "dapo", "clip_high": 0.3, "overlong": {"buffer": 7}})
    assert config.clip_high == 0.3 and config.aggregate == "token"
    assert (config.overlong.enabled, config.overlong.buffer) == (True, 7)
    assert not RlConfig.model_validate({"preset": "dapo", "overlong": {"enabled": False}}).overlong.enabled
    assert PRESETS["dapo"]["overlong"] == {"enabled": True}


def test_values_of_a_preset_have_the_preset_as_origin(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("train:\n  rl:\n    preset: dapo\n    clip_high: 0.3\n    overlong: {buffer: 7}\n")
    origins = load_recipe(file, sets=["train.rl.clip_low=0.1"]).origins
    assert origins["train.rl.preset"] == f"{file}:3"
    assert origins["train.rl.aggregate"] == origins["train.rl.overlong.enabled"] == "preset dapo"
    assert origins["train.rl.clip_high"] == f"{file}:4" and origins["train.rl.overlong.buffer"] == f"{file}:5"
    assert origins["train.rl.clip_low"] == "--set"
    assert origins["train.rl.steps"] == origins["train.rl.overlong.penalty"] == "default"


def test_an_overlay_may_name_another_preset(tmp_path: Path) -> None:
    base, over = tmp_path / "base.yaml", tmp_path / "over.yaml"
    base.write_text("train: {rl: {preset: dapo}}\n")
    over.write_text("train: {rl: {preset: dr_grpo}}\n")
    loaded = load_recipe(base, overlays=[over])
    assert loaded.recipe.train.rl.aggregate == "constant"
    assert loaded.origins["train.rl.aggregate"] == "preset dr_grpo"
    assert loaded.origins["train.rl.overlong.enabled"] == "default"


@pytest.mark.parametrize("preset", PRESETS)
def test_a_resolved_recipe_with_a_preset_loads_back_equal(preset: str, tmp_path: Path) -> None:
    recipe = load_recipe("tiny_mtp", sets=[f"train.rl.preset={preset}"]).recipe
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump_resolved(recipe))
    assert load_recipe(resolved).recipe == recipe
