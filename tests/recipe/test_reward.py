"""The section `reward`: names of functions, the older key, and files next to the recipe."""

from __future__ import annotations

import os
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest

from mtpctl.recipe import yaml12
from mtpctl.recipe.loading import dump_resolved, load_recipe
from mtpctl.recipe.reward import BUILT_IN, DEFAULT_TIME_LIMIT_S, TIME_LIMIT_ARGS, RewardConfig, check_answers, check_reward
from mtpctl.recipe.schema import Recipe
from mtpctl.user_code import load


def test_built_in_functions_exist() -> None:
    assert all(callable(load(reference, "reward.function")) for reference in BUILT_IN.values())


def test_the_older_key_names_the_function_and_a_resolved_recipe_loads_back() -> None:
    loaded = load_recipe("tiny_mtp", sets=["data.checker=math"])
    assert (loaded.recipe.reward.function, loaded.origins["reward.function"]) == ("math", "--set")
    assert Recipe.model_validate(yaml12.parse(dump_resolved(loaded.recipe), "r").value) == loaded.recipe
    assert load_recipe("tiny_mtp").recipe.reward.function == "exact"


def test_both_keys_with_different_functions_are_refused_and_with_the_same_are_not() -> None:
    both = load_recipe("tiny_mtp", sets=["data.checker=exact", "reward.function=math"]).recipe
    assert list(check_reward(both.reward, both.data.checker)) == [
        "data.checker: exact is the older key for reward.function, which is math; remove data.checker"
    ]
    assert list(check_reward(RewardConfig(function="math"), "math")) == []


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("exat", "reward.function: 'exat' is not built in; did you mean exact?"),
        ("judge.py", "reward.function: judge.py is a file; name the function in it, as judge.py:score"),
        ("no/such.py:score", f"reward.function: there is no file no/such.py in {Path('no').resolve()}"),
    ],
)
def test_missing_function_is_reported(function: str, message: str) -> None:
    assert list(check_reward(RewardConfig(function=function), None)) == [message]


def test_a_file_of_almost_that_name_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "judge.py").touch()
    (message,) = check_reward(RewardConfig(function=f"{tmp_path / 'jugde.py'}:score"), None)
    assert message.endswith(f"did you mean {tmp_path / 'judge.py'}?")


@pytest.fixture
def task(tmp_path: Path) -> Path:
    folder = tmp_path / "mytask"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("data: {path: rows.jsonl}\nreward: {function: judge.py:score}\n")
    (folder / "rows.jsonl").touch()
    (folder / "judge.py").touch()
    return folder


def test_files_are_found_in_the_folder_of_the_recipe_that_names_them_and_become_absolute(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("mytask/recipe.yaml").recipe
    assert (recipe.data.path, recipe.reward.function) == (str(task / "rows.jsonl"), f"{task / 'judge.py'}:score")


def test_files_in_the_working_directory_come_first_and_a_set_is_also_looked_up_next_to_the_recipe(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge.py").touch()
    recipe = load_recipe("mytask/recipe.yaml", sets=["data.path=rows.jsonl"]).recipe
    assert (recipe.data.path, recipe.reward.function) == (str(tmp_path / "mytask" / "rows.jsonl"), f"{tmp_path / 'judge.py'}:score")


def test_names_that_are_no_files_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkdir("exact")
    assert load_recipe("tiny_mtp", sets=["reward.function=exact"]).recipe.reward.function == "exact"
    assert load_recipe("tiny_mtp", sets=["reward.function=package.judge:score"]).recipe.reward.function == "package.judge:score"


def test_an_answers_own_bound_has_to_be_under_that_of_a_call() -> None:
    config = RewardConfig(function="code", args={"timeout_s": 60})
    assert list(check_reward(config, None)) == ["reward.timeout_s: must be more than reward.args.timeout_s: 60, got 30"]
    assert list(check_reward(RewardConfig(function="math", args={"seconds": 2}), None)) == []
    (complaint,) = check_reward(RewardConfig(function="math", timeout_s=3), None)
    assert complaint == "reward.timeout_s: must be more than reward.args.seconds: 5, got 3"
    assert list(check_reward(RewardConfig(function="mine.b:score", args={"timeout_s": 60}), None)) == []


def test_default_time_limits_are_those_of_the_functions() -> None:
    for name, argument in TIME_LIMIT_ARGS.items():
        module, _, function = BUILT_IN[name].partition(":")
        assert signature(getattr(import_module(module), function)).parameters[argument].default == DEFAULT_TIME_LIMIT_S


def test_a_reward_around_one_that_compares_answers_needs_them_too() -> None:
    sets = ["reward.function=length", "reward.args={max: 512}", "data.columns.answer=null"]
    assert list(check_answers(load_recipe("tiny_mtp", sets=sets).recipe)) == [
        "data.columns.answer: the reward exact needs an answer to compare with, got null; name the column"
    ]
