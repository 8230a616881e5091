"""What a recipe may say and this version does not do is refused before anything starts."""

import pytest

from mtpctl.recipe import UserError, load_recipe
from mtpctl.train.unsupported import check_supported


def test_the_tiny_recipe_runs() -> None:
    check_supported(load_recipe("tiny_mtp").recipe)


@pytest.mark.parametrize(
    "text",
    [
        "sync.on_collapse=error",
        "sync.transport=nccl",
    ],
)
def test_a_key_that_would_change_nothing_is_refused_by_name(text: str) -> None:
    with pytest.raises(UserError, match=text.split("=")[0]):
        check_supported(load_recipe("tiny_mtp", sets=[text]).recipe)
