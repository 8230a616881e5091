"""What a manual sync starts, and where it stores versions."""

from __future__ import annotations

import pytest

from mtpctl.errors import UserError
from mtpctl.jobs.sync import _with_separate_url, sync_manually
from mtpctl.recipe.loading import load_recipe

STORAGE = ("sync.transport=storage", "sync.url=s3://bucket/{name}")


def test_recipe_without_a_stage_that_generates_needs_running_engines() -> None:
    with pytest.raises(UserError, match=r"^train\.stages: no stage generates, so the recipe starts no engines; name running ones by --to$"):
        sync_manually(load_recipe("tiny_mtp", sets=["train.stages=[sft]"]).recipe, None, [], verify=False, repeat=1)


def test_versions_in_object_storage_are_apart_from_those_of_a_run() -> None:
    """A store deletes the versions in its folder when it is closed."""
    recipe = load_recipe("tiny_mtp", sets=STORAGE).recipe
    urls = {_with_separate_url(recipe).sync_url for _ in range(2)}
    assert len(urls) == 2 and all(str(url).startswith("s3://bucket/tiny_mtp/sync-weights-") for url in urls)
    assert _with_separate_url(load_recipe("tiny_mtp").recipe).sync_url is None
