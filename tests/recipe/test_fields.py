"""Secrets in recipes are rejected before anything is printed or written; `env:NAME` replaces them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtpctl.errors import UserError
from mtpctl.recipe.fields import mask_secrets
from mtpctl.recipe.loading import load_recipe
from mtpctl.user_code import from_environment

SECRET = "s3cr3t-of-mine"


@pytest.mark.parametrize(
    "text",
    [
        f"reward: {{function: llm_judge, args: {{api_key: {SECRET}}}}}",
        f"reward: {{args: {{nested: {{headers: {{Authorization: {SECRET}}}}}}}}}",
        f"reward: {{function: length, args: {{of_args: {{token: {SECRET}}}}}}}",
        f"rollout: {{agent_args: {{password: {SECRET}}}}}",
        f"rollout: {{environment_args: {{db_password: {SECRET}}}}}",
        f"rollout: {{engine_args: {{hf_token: {SECRET}}}}}",
        f"reward: {{args: {{url: 'https://me:{SECRET}@judge/v1'}}}}",
        f"reward: {{args: {{url: 'https://judge/v1?api_key={SECRET}'}}}}",
        f"reward: {{args: {{urls: ['http://a/', 'redis://:{SECRET}@judge/0']}}}}",
        f"cluster: {{address: 'ray://me:{SECRET}@head:10001'}}",
        f"train: {{checkpoint_copy: 's3://me:{SECRET}@bucket/run'}}",
        f"rollout: {{environment_eval_args: {{api_key: {SECRET}}}}}",
        f"evaluation: {{sets: {{hard: {{reward: {{args: {{api_key: {SECRET}}}}}}}}}}}",
        f"data: {{path: 'https://me:{SECRET}@host/rows.jsonl'}}",
        f"train: {{rl: {{teacher: {{path: 'https://me:{SECRET}@host/v1'}}}}}}",
        "reward: {args: {note: 'hf_abcdefghijklmnopqrstuvwx'}}",
        "reward: {args: {note: 'Bearer abcdef'}}",
    ],
)
def test_secret_in_a_recipe_is_refused_without_being_repeated(text: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    with pytest.raises(UserError, match="secrets do not belong in a recipe") as error:
        load_recipe(recipe)
    assert str(recipe) in str(error.value)
    assert SECRET not in str(error.value) and "\n" not in str(error.value) and "abcdef" not in str(error.value)


@pytest.mark.parametrize(
    "text", [f"reward.args.api_key={SECRET}", f"reward.nothing.api_key={SECRET}", f"data.paths=https://me:{SECRET}@host/rows.jsonl"]
)
def test_error_about_an_override_does_not_repeat_its_secret(text: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: a")
    with pytest.raises(UserError) as error:
        load_recipe(recipe, sets=[text])
    assert SECRET not in str(error.value)


def test_value_from_the_environment_is_read_when_the_function_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("reward: {args: {api_key: env:JUDGE_KEY, more: {token: env:JUDGE_KEY, list: [env:JUDGE_KEY, plain]}}}")
    args = load_recipe(recipe).recipe.reward.args
    assert args["api_key"] == "env:JUDGE_KEY"
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    assert from_environment(args, "reward.args") == {"api_key": SECRET, "more": {"token": SECRET, "list": [SECRET, "plain"]}}
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(UserError, match=r"reward\.args\.api_key: JUDGE_KEY is not set in the environment"):
        from_environment(args, "reward.args")


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens: 5",
        "reward.args.tokens=5",
        "https://host/v1?page=2",
        "hf://someone/some-data-set",
        "reward.args.api_key=env:NAME",
    ],
)
def test_text_without_secret_is_not_masked(text: str) -> None:
    assert mask_secrets(text) == text
